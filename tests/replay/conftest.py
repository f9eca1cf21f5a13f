"""Trajectories of the tiny checkpoint to replay, and the same weights with gradients."""

from collections.abc import Callable
from typing import Any

import pytest
from diffusers import LTX2VideoTransformer3DModel

from pipeline.checkpoint import load
from pipeline.conditioning import Conditioning
from pipeline.engine import Engine
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.trajectory import TrajectoryView
from tests.engines import settle
from tests.replay.rollouts import BUCKETS, GUIDED, LEVELS, Order, Rolled, Trajectory, both, roll


@pytest.fixture(scope="session")
def mixed(
    transformer: LTX2VideoTransformer3DModel, card: ModelCard, order: Order, trajectory: Trajectory
) -> dict[tuple[str, bool], list[Rolled]]:
    """Two samples of every kind, guided and not, that came one after the other and shared their passes."""
    engine = Engine(VelocityModel(transformer), card, row_buckets=BUCKETS)
    jobs = {
        (kind, guided): [order(k, transition=both(kind), **(GUIDED if guided else {})) for k in range(2)]
        for guided in (False, True)
        for kind in LEVELS
    }
    futures = {}
    for key, group in jobs.items():
        futures[key] = [engine.submit(job) for job in group]
        engine.tick()
    settle(engine)
    return {
        key: [
            Rolled(view=trajectory(future.result(timeout=0)), conditioning=job.conditioning)
            for future, job in zip(futures[key], jobs[key], strict=True)
        ]
        for key in jobs
    }


@pytest.fixture(scope="session")
def trainable() -> LTX2VideoTransformer3DModel:
    """The same weights, of which each asks for a gradient."""
    return load("tiny", "transformer").requires_grad_(True)


@pytest.fixture
def one_sample(
    transformer: LTX2VideoTransformer3DModel, card: ModelCard, order: Order, trajectory: Trajectory
) -> Callable[..., tuple[TrajectoryView, Conditioning]]:
    """``one_sample(**request)``: its trajectory and its conditioning."""

    def one_sample(**request: Any) -> tuple[TrajectoryView, Conditioning]:
        (rolled,) = roll(transformer, card, trajectory, order(**request))
        return rolled.view, rolled.conditioning

    return one_sample
