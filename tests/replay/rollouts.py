"""Finished samples to replay, and what a replay of them must give."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from diffusers import LTX2VideoTransformer3DModel

from pipeline.conditioning import Conditioning
from pipeline.engine import Engine
from pipeline.noise import MODALITIES
from pipeline.replay import StepLogProbs
from pipeline.sample import Job
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.trajectory import TrajectoryView
from tests.engines import sample

LEVELS = {"sde": 0.7, "cps": 0.8, "dance": 0.3}
GUIDED = {"guidance": {"video": 3.0, "audio": 2.0}, "negative_prompt": "blurry"}
BUCKETS = (1, 2, 4, 8)

Order = Callable[..., Job]
Trajectory = Callable[..., TrajectoryView]


def both(kind: str, **changes: Any) -> dict[str, Any]:
    """A transition of that kind for video and audio."""
    how = {"kind": kind, "noise_level": LEVELS[kind], **changes}
    return {"video": how, "audio": how}


@dataclass(frozen=True, kw_only=True)
class Rolled:
    """A finished sample's trajectory, and what it was conditioned on."""

    view: TrajectoryView
    conditioning: Conditioning


def roll(
    transformer: LTX2VideoTransformer3DModel,
    card: ModelCard,
    trajectory: Trajectory,
    *jobs: Job,
    row_buckets: Sequence[int] = BUCKETS,
) -> list[Rolled]:
    """The jobs' trajectories; they are submitted together."""
    engine = Engine(VelocityModel(transformer), card, row_buckets=row_buckets)
    return [
        Rolled(view=trajectory(finished, of=transformer), conditioning=job.conditioning)
        for finished, job in zip(sample(engine, jobs), jobs, strict=True)
    ]


@contextmanager
def counted_passes(transformer: LTX2VideoTransformer3DModel) -> Iterator[list[int]]:
    """The number of rows of each forward pass meanwhile."""
    rows: list[int] = []
    hook = transformer.register_forward_pre_hook(
        lambda module, args, inputs: rows.append(len(inputs["hidden_states"])), with_kwargs=True
    )
    try:
        yield rows
    finally:
        hook.remove()


def assert_the_same_bits(scored: list[StepLogProbs], view: TrajectoryView) -> None:
    """Every stochastic step was scored, and with the manifest's numbers."""
    recorded = {modality: view.manifest[f"log_probs_{modality}"] for modality in MODALITIES}
    assert [one.step for one in scored] == [
        step
        for step in range(view.manifest["num_steps"])
        if any(recorded[m][step] is not None for m in MODALITIES)
    ]
    assert scored
    for one in scored:
        for modality in MODALITIES:
            value = getattr(one, modality)
            assert (None if value is None else value.item()) == recorded[modality][one.step], (
                one.step,
                modality,
            )
