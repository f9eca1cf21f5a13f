"""One move of one modality from sigma to sigma_next: mean, std, next state and log-prob.

Pure functions of tensors. They know no model, no schedule and no random state: the caller brings the noise, or the
next state when a stored move is scored. Sampling and scoring run the same lines, so scoring a stored state under the
same velocity gives back the same bits. All arithmetic is float32, whatever the inputs are (a 0-dim float32 times a
bfloat16 tensor would silently give bfloat16).

Sources: ``sde`` Flow-GRPO (arXiv 2505.05470), ``dance`` DanceGRPO (arXiv 2505.07818), ``cps`` coefficient-preserving
sampling (arXiv 2509.05952), ``ode`` the Euler step of FlowMatchEulerDiscreteScheduler.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["sde", "cps", "dance", "ode"]
LogProbKind = Literal["density", "squared_error"]

_LN_SQRT_2PI = math.log(math.sqrt(2 * math.pi))


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """B rows that moved one step; L tokens, C channels."""

    next_sample: Tensor
    """State at sigma_next, [B, L, C], in the storage dtype it was rounded to."""
    mean: Tensor
    """Mean of the next state, float32 [B, L, C]."""
    std: Tensor
    """Standard deviation per row, float32 [B] on the CPU; 0 where the move is deterministic."""
    log_prob: Tensor | None
    """Mean over a row's elements of the log-prob, float32 [B]; None where the move is deterministic."""


def transition(
    kind: Kind,
    sample: Tensor,
    velocity: Tensor,
    *,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    sigma_1: float | Tensor,
    noise_level: float,
    noise: Tensor | None = None,
    next_sample: Tensor | None = None,
    log_prob_kind: LogProbKind = "density",
    storage_dtype: torch.dtype = torch.float32,
) -> Transition:
    """Move ``sample`` [B, L, C] along ``velocity`` (after guidance), or score the move to ``next_sample``.

    ``sigma``, ``sigma_next`` and ``sigma_1`` (the grid's second value, which stands in for a first sigma close to 1)
    are scalars or one value per row. Give ``noise`` [B, L, C] to sample, ``next_sample`` to score, neither for a
    deterministic move. The next state is rounded to ``storage_dtype`` before it is scored, so that the log-prob is
    that of the state which is stored and used.

    ``log_prob_kind``: ``"density"`` is the Gaussian log-density, ``"squared_error"`` is -(x' - mean)^2 alone.

    Raises ValueError when a stochastic move is given neither noise nor a next state, or both; when its std is 0
    (``cps`` on the last step), where a density does not exist; and for a noise level that the kind cannot take.
    """
    x, v = sample.float(), velocity.float()
    now, after, first = (_per_row(value, x) for value in (sigma, sigma_next, sigma_1))
    if is_deterministic(kind, noise_level):
        mean = x + (after - now).to(x.device) * v
        moved = mean.to(storage_dtype) if next_sample is None else next_sample
        return Transition(next_sample=moved, mean=mean, std=torch.zeros(len(x)), log_prob=None)

    if (noise is None) == (next_sample is None):
        raise ValueError(f"a {kind} transition takes either noise (to sample) or next_sample (to score)")
    mean, std = _moments(kind, x, v, now, after, first, noise_level)
    if not bool((std > 0).all()):
        raise ValueError(
            f"{kind} with noise_level {noise_level} has std 0 between sigma {_show(now)} and {_show(after)}, "
            "so the move has no log-prob; make this step ode"
        )
    if next_sample is None:
        assert noise is not None
        next_sample = (mean + std.to(x.device) * noise.to(x.device, torch.float32)).to(storage_dtype)
    return Transition(
        next_sample=next_sample,
        mean=mean,
        std=std.flatten(),
        log_prob=_log_prob(next_sample.float(), mean, std, log_prob_kind),
    )


def is_deterministic(kind: Kind, noise_level: float) -> bool:
    """Whether the kind moves without noise at every step: ``ode``, or any kind at noise level 0."""
    return kind == "ode" or noise_level == 0


def _moments(
    kind: Kind, x: Tensor, v: Tensor, now: Tensor, after: Tensor, first: Tensor, noise_level: float
) -> tuple[Tensor, Tensor]:
    """Mean [B, L, C] on the samples' device and std [B, 1, 1] on the CPU, of the next state."""
    delta = after - now
    if kind == "cps":
        if not 0 < noise_level <= 1:
            raise ValueError(
                f"noise_level of cps must lie in [0, 1] (the sine wraps beyond), got {noise_level}"
            )
        std = after * math.sin(noise_level * math.pi / 2)
        kept = torch.sqrt(after**2 - std**2)
        to_clean, to_noisy, weight, kept = (c.to(x.device) for c in (now, 1 - now, 1 - after, kept))
        return (x - to_clean * v) * weight + (x + to_noisy * v) * kept, std
    if noise_level < 0:
        raise ValueError(f"noise_level must be at least 0, got {noise_level}")
    if kind == "sde":
        # ltx-core's first sigma is 0.99999994 and diffusers' is 1: comparing with == 1 would blow the former up.
        bounded = torch.where(torch.isclose(now, torch.ones_like(now)), first, now)
        scale = torch.sqrt(now / (1 - bounded)) * noise_level
    else:
        scale = torch.full_like(now, noise_level)
    drift = scale**2 / (2 * now)
    of_x, of_v = 1 + drift * delta, (1 + drift * (1 - now)) * delta
    return x * of_x.to(x.device) + v * of_v.to(x.device), scale * torch.sqrt(-delta)


def _log_prob(x: Tensor, mean: Tensor, std: Tensor, kind: LogProbKind) -> Tensor:
    """Mean log-prob of each row, [B]. Rows are reduced one at a time: their bits never depend on their number."""
    error = -((x - mean) ** 2)
    if kind == "density":
        doubled_variance, log_scale = 2 * std**2, torch.log(std) + _LN_SQRT_2PI
        error = error / doubled_variance.to(x.device) - log_scale.to(x.device)
    return torch.stack([row.mean() for row in error])


def _per_row(value: float | Tensor, like: Tensor) -> Tensor:
    """A scalar or [B] as float32 [B, 1, 1] on the CPU, where all coefficients are computed: the same bits on every
    device, and no wait for one."""
    tensor = torch.as_tensor(value, dtype=torch.float32, device="cpu")
    return tensor.expand(len(like)).view(-1, *[1] * (like.ndim - 1))


def _show(sigmas: Tensor) -> str:
    return ", ".join(f"{value:.6g}" for value in sigmas.flatten().tolist())
