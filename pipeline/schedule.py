"""Sigma grids, computed by diffusers' own scheduler with the shift given.

Sigmas are carried as float32 from here to the trajectory: ``timestep / 1000`` drifts by an ulp. Sigmas that a
trainer gives are used as they are and never pass through here (the scheduler would shift them again).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

CONSTANT_SHIFT_TOKENS = 4096
"""LTX-2.3's official grid takes the shift of this many tokens whatever the geometry is (ltx-core 1.0: mu = 2.05)."""

LTX23_SCHEDULER: Mapping[str, Any] = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}
"""The scheduler config of LTX-2.3's checkpoint."""


def sigma_grid(
    num_inference_steps: int,
    *,
    shift: Literal["constant", "tokens"] = "constant",
    num_tokens: int | None = None,
    scheduler_config: Mapping[str, Any] = LTX23_SCHEDULER,
) -> Tensor:
    """Sigmas of a rollout, float32 [num_inference_steps + 1], falling from 1 to the terminal 0.

    ``shift="constant"`` is LTX-2.3's official grid; ``"tokens"`` reproduces diffusers' LTX2Pipeline, whose shift
    grows with the number of video tokens (unclamped) and needs ``num_tokens``.

    Raises ValueError when ``num_tokens`` is missing for ``"tokens"``.
    """
    if shift == "tokens" and num_tokens is None:
        raise ValueError('sigma_grid needs num_tokens for shift="tokens"; give the number of video tokens')
    tokens = CONSTANT_SHIFT_TOKENS if shift == "constant" else num_tokens
    assert tokens is not None
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler_config))
    uniform = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
    scheduler.set_timesteps(sigmas=uniform, mu=_shift_of(tokens, scheduler.config))
    sigmas: Tensor = scheduler.sigmas
    return sigmas


def explicit_grid(sigmas: Sequence[float]) -> Tensor:
    """A trainer's own sigmas (terminal 0 left out) as float32 [steps + 1], otherwise unchanged."""
    return torch.tensor([*sigmas, 0.0], dtype=torch.float32)


def _shift_of(num_tokens: int, config: Mapping[str, Any]) -> float:
    """mu, linear in the number of tokens through the config's two anchors (diffusers: calculate_shift)."""
    first, last = config.get("base_image_seq_len", 1024), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.95), config.get("max_shift", 2.05)
    slope = (high - low) / (last - first)
    return float(num_tokens * slope + (low - slope * first))
