"""The parity probe: how far a replay of a finished trajectory is from what was recorded while it was sampled.

Under the weights and the execution profile of the rollout every difference is exactly 0 and every ratio exactly 1. What
else it finds is what a trainer's first ratio would hide: weights that were not applied, or a forward pass that is
another one.
"""

from dataclasses import dataclass

import torch
from diffusers import LTX2VideoTransformer3DModel

from pipeline.conditioning import Conditioning
from pipeline.noise import MODALITIES, Modality
from pipeline.replay import log_probs
from pipeline.stored_moves import scorable_steps
from schemas.trajectory import TrajectoryView


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityGap:
    """One stochastic move of one modality. Both numbers are NaN where a log-prob is."""

    step: int
    modality: Modality
    log_prob_difference: float
    """|replayed - recorded|."""
    ratio: float
    """exp(replayed - recorded); inf where that is too large."""


@torch.inference_mode()
def parity(
    transformer: LTX2VideoTransformer3DModel, trajectory: TrajectoryView, conditioning: Conditioning
) -> list[ParityGap]:
    """Replay every step of ``trajectory`` that can be, without gradients; rising in steps, empty where there is none.

    It costs a forward pass per step, of the size of the rollout's, on the thread that calls it.

    Raises ValueError where ``pipeline.replay.log_probs`` does.
    """
    steps = scorable_steps(trajectory)
    return [
        _gap(
            scored.step, modality, log_prob.item(), trajectory.manifest[f"log_probs_{modality}"][scored.step]
        )
        for scored in (log_probs(transformer, trajectory, conditioning, steps) if steps else [])
        for modality in MODALITIES
        if (log_prob := getattr(scored, modality)) is not None
    ]


def _gap(step: int, modality: Modality, replayed: float, recorded: float) -> ParityGap:
    change = torch.tensor(replayed - recorded, dtype=torch.float64)
    return ParityGap(
        step=step,
        modality=modality,
        log_prob_difference=change.abs().item(),
        ratio=change.exp().item(),
    )
