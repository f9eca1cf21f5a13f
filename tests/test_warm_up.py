"""Before a denoiser is ready: every size is run once, and batch invariance is proved where it is promised."""

from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from pipeline.batching import Buckets
from pipeline.velocity import VelocityModel
from pipeline.warm_up import check_batch_invariance, warm_up
from schemas.card import ModelCard
from tests.engines import RowByRow, StillTransformer


class LeaksPosition(RowByRow):
    """A row's bits depend on its index, as with kernels that end a vectorised loop in a scalar one."""

    def __call__(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        video, audio = super().__call__(**inputs)
        return video, audio + 1e-7 * torch.arange(len(audio)).view(-1, 1, 1)


class LeaksNeighbours(RowByRow):
    """A row's bits depend on what the other rows hold, wherever they stand: one scale for the whole batch."""

    def __call__(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        video, audio = super().__call__(**inputs)
        return video * (1 + 1e-3 * video.mean()), audio


def test_warming_up_runs_every_size_once_at_the_default_geometry(card: ModelCard) -> None:
    still = StillTransformer()
    warm_up(VelocityModel(still), card, Buckets(sizes=(1, 2, 4)))
    assert [len(batch["hidden_states"]) for batch in still.batches] == [1, 2, 4]
    assert {tuple(batch["hidden_states"].shape[1:]) for batch in still.batches} == {(12, card.video_channels)}
    assert all(
        batch["encoder_hidden_states"].shape[1:] == (card.max_prompt_tokens, card.video_context_dim)
        for batch in still.batches
    )


def test_the_tiny_transformer_warms_up(model: VelocityModel, card: ModelCard) -> None:
    warm_up(model, card, Buckets(sizes=(1, 2)))


def test_one_row_is_always_invariant(model: VelocityModel, card: ModelCard) -> None:
    check_batch_invariance(model, card, 1)


def test_rows_that_are_computed_alone_are_invariant_at_any_number(
    transformer: LTX2VideoTransformer3DModel, card: ModelCard
) -> None:
    check_batch_invariance(VelocityModel(RowByRow(transformer)), card, 3)


@pytest.mark.parametrize(("leak", "index"), [(LeaksPosition, 1), (LeaksNeighbours, 0)])
def test_a_row_whose_bits_depend_on_its_place_or_its_neighbours_is_refused_with_the_remedy(
    leak: type[RowByRow], index: int, transformer: LTX2VideoTransformer3DModel, card: ModelCard
) -> None:
    model = VelocityModel(leak(transformer))
    check_batch_invariance(model, card, 1)
    with pytest.raises(
        ValueError, match=rf"row_buckets \[3\] on cpu: .*\(at index {index}\); use row_buckets \[1\]"
    ):
        check_batch_invariance(model, card, 3)


def test_nothing_here_touches_the_global_generator_or_asks_for_gradients(
    model: VelocityModel, card: ModelCard
) -> None:
    before = torch.get_rng_state()
    warm_up(model, card, Buckets(sizes=(1,)))
    check_batch_invariance(model, card, 1)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.transformer.parameters())
