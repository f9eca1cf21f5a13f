"""Work beside the step: it changes when something is computed, never what. And the engine's totals of its work."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deployments.metrics import Rates
from pipeline.engine import Engine
from pipeline.noise import MODALITIES, draw, noise_key
from pipeline.sample import Job
from pipeline.side_work import Draws, HostCopies, to_device
from pipeline.stats import EngineStats
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from tests.engines import StillTransformer, sample

CPU = torch.device("cpu")


@pytest.mark.parametrize("ahead", [True, False])
def test_a_draw_is_the_same_ahead_and_at_once(ahead: bool) -> None:
    key = noise_key(1, 2, "video", 3)
    with ThreadPoolExecutor(1) as executor:
        draws = Draws(executor)
        if ahead:
            draws.prepare(key, (4, 5))
        assert torch.equal(draws.take(key, (4, 5)), draw(key, (4, 5)))


def test_drawing_ahead_happens_on_the_side_thread_and_only_once() -> None:
    with ThreadPoolExecutor(1) as executor:
        draws = Draws(executor)
        for _ in range(3):
            draws.prepare(7, (2,))
        assert len(draws._ahead) == 1
        draws.take(7, (2,))
        assert not draws._ahead


def test_a_copy_goes_into_the_room_that_was_made_for_it() -> None:
    copies, tensor = HostCopies(CPU), torch.randn(3, 2).bfloat16()
    room = copies.room((4, 3, 2), tensor.dtype)
    copied = copies.start(tensor, into=room[1]).wait()
    assert copied.data_ptr() == room[1].data_ptr()
    assert torch.equal(room[1], tensor)
    assert to_device(tensor, CPU) is tensor


def test_a_sample_records_only_what_was_asked_for_and_packs_it_without_a_copy(
    card: ModelCard, order: Callable[..., Job]
) -> None:
    engine = Engine(VelocityModel(StillTransformer()), card, row_buckets=(1,))
    (finished,) = sample(engine, [order(0, num_inference_steps=5, return_steps=[0, 3])])
    kept = finished.sample
    for modality in MODALITIES:
        assert kept.stacked[modality].shape[0] == 3, "states 0, 3 and the last"
        rows = [state.latents[modality].data_ptr() for state in kept.kept]
        assert rows == [kept.stacked[modality][k].data_ptr() for k in range(3)]
        assert torch.equal(kept.stacked[modality][2], kept.latents[modality])


def test_the_totals_tell_rows_padding_tokens_and_outcomes(card: ModelCard, order: Callable[..., Job]) -> None:
    engine = Engine(VelocityModel(StillTransformer()), card, row_buckets=(1, 2, 4))
    jobs = [order(k, num_inference_steps=2) for k in range(3)]
    finished = sample(engine, jobs)
    of = finished[0].sample.geometry
    stats = engine.stats
    assert (stats.ticks, stats.rows, stats.padded_rows) == (2, 6, 2), "three rows in a pass of four, twice"
    assert stats.tokens == 6 * (of.num_video_tokens + of.audio_frames)
    assert (stats.done, stats.cancelled, stats.expired, stats.failed) == (3, 0, 0, 0)
    assert 0 < stats.forward_s <= stats.busy_s
    engine.submit(order(0)).cancel()
    engine.submit(order(1, job={"expires_at": 0.0}))
    engine.tick()
    assert (stats.done, stats.cancelled, stats.expired, stats.failed) == (3, 1, 1, 0)


def test_rates_are_those_of_the_interval() -> None:
    before = EngineStats(ticks=10, rows=40, padded_rows=0, tokens=1000, busy_s=5.0)
    after = EngineStats(ticks=12, rows=46, padded_rows=2, tokens=1600, busy_s=6.0)
    assert Rates.between(before, after) == Rates(
        rows_per_tick=3.0, padding_share=0.25, tokens_per_second=600.0, step_seconds=0.5
    )
    assert Rates.between(after, after) == Rates(
        rows_per_tick=0.0, padding_share=0.0, tokens_per_second=0.0, step_seconds=0.0
    )
