"""Keyed noise: every draw of a rollout is a pure function of (seed, sample, modality, step).

It deliberately knows no device, no batch and no schedule: a draw never depends on a sample's neighbours, on which
other steps are stochastic, on the replica or on a retry. The global generator is never touched, and only integers
ever travel between processes (a ``torch.Generator`` loses its state when it is pickled).
"""

from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor

Modality = Literal["video", "audio"]
MODALITIES: tuple[Modality, Modality] = ("video", "audio")


def noise_key(
    seed: int, sample_index: int | Literal["shared"], modality: Modality, step: int | Literal["init"]
) -> int:
    """The generator seed of one draw, in [0, 2**63).

    ``sample_index`` is ``"shared"`` for an initial draw that a whole group has in common; ``step`` is ``"init"`` for
    the initial latents, else the index of the transition. blake2b (8 bytes, little-endian) of the UTF-8 text
    ``"{seed}/{sample_index}/{modality}/{step}"``, with the sign bit cleared.
    """
    digest = blake2b(f"{seed}/{sample_index}/{modality}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def draw(key: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32 values of ``shape`` on the CPU (CUDA's stream depends on the GPU model, the CPU's does not)."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(key), dtype=torch.float32)
