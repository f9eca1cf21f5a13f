"""A shared prefix: the group's common steps once, and the same samples to the bit."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from diffusers import LTX2VideoTransformer3DModel

from pipeline.conditioning import Conditioning
from pipeline.engine import Engine
from pipeline.entry import Finished
from pipeline.prefix import read_prefix
from pipeline.replay import log_probs
from pipeline.sample import Job, Prefix
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.resolve import resolve
from schemas.trajectory import read_trajectory
from tests.engines import StillTransformer, sample

Order = Callable[..., Job]
Table = Callable[..., pa.Table]

WINDOW = [3, 4]
SHARED = {"shared_initial_noise": True, "stochastic_steps": WINDOW}
GUIDED = {"guidance": {"video": 3.0, "audio": 2.0}, "negative_prompt": "noise"}


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("further", [{}, GUIDED, {"return_steps": "transitions"}, {"return_steps": [1]}])
def test_branches_equal_samples_that_share_nothing_to_the_bit(
    further: dict[str, Any],
    state_dtype: str,
    model: VelocityModel,
    card: ModelCard,
    order: Order,
    table: Table,
) -> None:
    fields = {**SHARED, **further, "state_dtype": state_dtype}

    def engine() -> Engine:
        return Engine(model, card, row_buckets=(1,))

    apart = [table(one) for one in sample(engine(), [order(k, **fields) for k in range(3)])]
    (made,) = sample(engine(), [order(0, **fields, shared_prefix=True, job={"until": WINDOW[0]})])
    prefix = read_prefix(table(made))
    assert prefix.step == WINDOW[0]
    branches = [order(k, **fields, shared_prefix=True, job={"prefix": prefix}) for k in range(3)]
    for one, branch in zip(apart, (table(branch) for branch in sample(engine(), branches)), strict=True):
        assert branch.equals(one)
        ours, theirs = read_trajectory(branch).manifest, read_trajectory(one).manifest
        for key in ("log_probs_video", "log_probs_audio", "sigmas", "places", "num_steps", "n_video"):
            assert ours[key] == theirs[key], key


def test_a_branch_replays_to_its_own_bits(
    transformer: LTX2VideoTransformer3DModel,
    model: VelocityModel,
    card: ModelCard,
    order: Order,
    table: Table,
    condition: Callable[..., Conditioning],
) -> None:
    engine = Engine(model, card, row_buckets=(1, 2, 4))
    (made,) = sample(engine, [order(0, **SHARED, shared_prefix=True, job={"until": WINDOW[0]})])
    job = {"prefix": read_prefix(table(made))}
    for finished in sample(engine, [order(k, **SHARED, shared_prefix=True, job=job) for k in range(3)]):
        view = read_trajectory(table(finished))
        scored = log_probs(transformer, view, condition("a red ball"))
        assert [step.step for step in scored] == WINDOW
        assert [float(step.video) for step in scored] == [view.manifest["log_probs_video"][k] for k in WINDOW]


def test_the_prefix_costs_its_steps_once_and_the_branches_the_rest(
    card: ModelCard, order: Order, table: Table
) -> None:
    still = StillTransformer()
    engine = Engine(VelocityModel(still), card, row_buckets=(1,))
    (made,) = sample(engine, [order(0, **SHARED, shared_prefix=True, job={"until": WINDOW[0]})])
    assert len(still.batches) == WINDOW[0] and made.sample.done
    job = {"prefix": made_prefix(made)}
    sample(engine, [order(k, **SHARED, shared_prefix=True, job=job) for k in range(4)])
    assert len(still.batches) == WINDOW[0] + 4 * (made.sample.num_steps - WINDOW[0])


def made_prefix(made: Finished) -> Prefix:
    """The prefix without a table between."""
    return Prefix(
        states=tuple(made.sample.kept),
        places=tuple(made.sample.places),
        policy_versions=tuple(made.sample.policy_versions),
    )


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"stochastic_steps": WINDOW}, "needs shared_initial_noise"),
        ({"shared_initial_noise": True}, "needs a first stochastic step above 0"),
        ({"shared_initial_noise": True, "stochastic_steps": []}, "needs a first stochastic step above 0"),
        ({"shared_initial_noise": True, "mode": "generate"}, "cannot be given in mode generate"),
    ],
)
def test_a_prefix_with_nothing_to_share_is_refused(
    fields: dict[str, Any], rule: str, card: ModelCard
) -> None:
    with pytest.raises(ValueError, match=rule):
        resolve({"prompt": "a red ball", "shared_prefix": True, **fields}, card)
