"""The parity probe: exactly 0 where all is well, and an error in the log where it is not."""

import logging
import math
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel

from deployments import probe as probe_module
from deployments.probe import ParityProbe
from pipeline.engine import Engine
from pipeline.entry import Finished
from pipeline.parity import ParityGap
from pipeline.sample import Job
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from tests.engines import sample
from tests.weights import fresh

Order = Callable[..., Job]
Table = Callable[..., pa.Table]


@pytest.fixture
def own() -> LTX2VideoTransformer3DModel:
    return fresh()


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was logged as an error."""
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    yield lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    logger.removeHandler(caplog.handler)


def probed(
    own: LTX2VideoTransformer3DModel,
    card: ModelCard,
    pack: Callable[[Finished], pa.Table],
    jobs: list[Job],
    every: int = 1,
) -> ParityProbe:
    """A probe that has seen these jobs."""
    model = VelocityModel(own)
    engine = Engine(model, card, row_buckets=(1, 2))
    engine.probe = probe = ParityProbe(model, pack, every, alarm=1e-5)
    sample(engine, jobs)
    return probe


def test_a_sound_replica_is_off_by_nothing(
    own: LTX2VideoTransformer3DModel,
    card: ModelCard,
    order: Order,
    table: Table,
    errors: Callable[[], list[str]],
) -> None:
    probe = probed(own, card, lambda f: table(f, of=own), [order(k) for k in range(2)])
    assert probe.worst is not None
    assert (probe.worst.log_prob_difference, probe.worst.ratio) == (0.0, 1.0)
    assert not errors()


def test_weights_that_are_not_those_of_the_sample_raise_the_alarm(
    own: LTX2VideoTransformer3DModel,
    card: ModelCard,
    order: Order,
    table: Table,
    errors: Callable[[], list[str]],
) -> None:
    def pack_and_spoil(finished: Finished) -> pa.Table:
        with torch.no_grad():
            own.proj_out.weight.mul_(1.5)
        return table(finished, of=own)

    probe = probed(own, card, pack_and_spoil, [order(0)])
    assert probe.worst is not None and probe.worst.log_prob_difference > 1e-3
    (message,) = errors()
    assert "above parity_alarm 1e-05" in message


def test_a_nan_raises_the_alarm_wherever_it_stands(
    own: LTX2VideoTransformer3DModel,
    card: ModelCard,
    order: Order,
    table: Table,
    errors: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gaps = [
        ParityGap(step=step, modality="video", log_prob_difference=difference, ratio=1.0)
        for step, difference in enumerate((0.0, math.nan, 0.0))
    ]
    monkeypatch.setattr(probe_module, "parity", lambda *_: gaps)
    probed(own, card, lambda f: table(f, of=own), [order(0)])
    assert "off by up to nan" in errors()[0]


def test_one_in_so_many_is_replayed_and_a_failing_replay_fails_no_sample(
    own: LTX2VideoTransformer3DModel, card: ModelCard, order: Order, errors: Callable[[], list[str]]
) -> None:
    packed: list[int] = []

    def broken(finished: Finished) -> pa.Table:
        packed.append(finished.sample.job.sample_index)
        raise RuntimeError("no table")

    jobs = [order(k, num_inference_steps=2) for k in range(6)]
    probe = probed(own, card, broken, jobs, every=3)
    assert len(packed) == 2 and probe.worst is None
    assert len(errors()) == 2
