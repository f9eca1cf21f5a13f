"""Weights of the generated checkpoints: a pure function of a component's name, a tensor's name and its
shape.

Plain random weights are a poor stand-in for trained ones: ten words among a thousand learned registers
are not heard, and decoders that normalise every pixel are deaf to their latents. So three things are put
on top of the noise: a *fold* that carries channels straight through a decoder, a *mark* by which text is
told from registers, and real filter banks in the vocoder. Louder audio latents give a louder waveform,
higher video latents brighter frames.

Invariant: every tensor has its own generator, keyed by its name; no global generator, order of
construction or number of threads matters.

Does not know architectures beyond the names and shapes of their tensors.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from diffusers.pipelines.ltx2.vocoder import UpSample1d
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.float64]]
T = TypeVar("T")

LOG_MEL_FLOOR = math.log(1e-5)
"""What MelSTFT gives for silence."""

# Each table: the first pattern that matches the whole "component.tensor" wins.

# Vectors: mean and standard deviation.
_VECTORS: tuple[tuple[str, tuple[float, float]], ...] = (
    (r"vae\.latents_mean", (0.0, 0.4)),
    (r"vae\.latents_std", (1.3, 0.15)),
    (r"audio_vae\.latents_mean", (0.2, 0.3)),
    (r"audio_vae\.latents_std", (0.8, 0.1)),
    (r"vae\.decoder\.conv_in\.conv\.bias", (0.0, 0.5)),
    (r"vae\.decoder\.conv_out\.conv\.bias", (-0.3, 0.02)),
    (r"audio_vae\.decoder\.conv_in\.conv\.bias", (-0.8, 0.2)),
    (r"audio_vae\.decoder\.conv_out\.conv\.bias", (0.2, 0.0)),
    (r"vocoder\..*\.bias", (0.0, 0.0)),
    (r".*scale_shift_table", (0.0, 0.5)),
    (r"text_encoder\..*norm\d?\.weight", (0.0, 0.1)),  # Gemma's norms multiply by 1 + weight
    (r".*norm.*\.weight", (1.0, 0.1)),
    (r".*", (0.0, 0.1)),
)

# Matrices and kernels: standard deviation times sqrt(fan in).
_GAINS: tuple[tuple[str, float], ...] = (
    (r"connectors\..*(to_out\.0|ff\.net\.2)\.weight", 0.5),
    (r"vae\.decoder\..*resnets.*conv2\.conv\.weight", 0.3),
    (r"vae\.decoder\..*(conv_in|upsamplers|conv_out).*\.weight", 0.4),
    (r"audio_vae\.decoder\..*conv2\.conv\.weight", 0.3),
    (r"audio_vae\.decoder\..*(conv_in|upsample).*\.weight", 0.3),
    (r"audio_vae\.decoder\.conv_out.*\.weight", 0.15),
    (r"vocoder\.bwe_generator\.conv_in\.weight", 0.02),
    (r"vocoder\..*\.convs2\..*\.weight", 0.3),
    (r".*", 1.0),
)

# Kernels with a fold: consecutive outputs that are the sub-positions of one channel, and the fold's gain.
_FOLDS: tuple[tuple[str, tuple[int, float]], ...] = (
    (r"vae\.decoder\.conv_in\.conv\.weight", (1, 1.0)),
    (r"vae\.decoder\.up_blocks\.[01]\.upsamplers\..*\.weight", (8, 1.0)),
    (r"vae\.decoder\.up_blocks\.2\.upsamplers\..*\.weight", (2, 1.0)),
    (r"vae\.decoder\.up_blocks\.3\.upsamplers\..*\.weight", (4, 1.0)),
    (r"vae\.decoder\.conv_out\.conv\.weight", (16, 0.6)),
    (r"audio_vae\.decoder\.(conv_in|up\.\d\.upsample\.conv)\.conv\.weight", (1, 1.0)),
    (r"audio_vae\.decoder\.conv_out\.conv\.weight", (1, 0.5)),
    (r".*", (1, 0.0)),
)

# Marks: constants added at an index. Registers have a high channel 0 and text a low one; text cross-attention
# asks for a low one.
_MARKS: tuple[tuple[str, tuple[Any, float]], ...] = (
    (r"connectors\..*learnable_registers", (np.s_[:, 0], 4.0)),
    (r"connectors\..*_text_proj_in\.bias", (0, -4.0)),
    (r"transformer\..*attn2\.to_k\.weight", (np.s_[:, 0], 1.0)),
    (r"transformer\..*attn2\.to_q\.bias", (np.s_[:], -1.0)),
)


def tensors(component: str, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """A value, float32, for every entry of a state dict of these shapes."""
    values = {name: _tensor(f"{component}.{name}", tuple(shapes[name])) for name in sorted(shapes)}
    if component == "vocoder":  # silence in, silence out: the bandwidth extender sees the floor as zero
        kernel, bias = (values[f"bwe_generator.conv_in.{part}"] for part in ("weight", "bias"))
        bias -= LOG_MEL_FLOOR * kernel.sum(axis=(1, 2))
    return {name: torch.from_numpy(value.astype(np.float32)) for name, value in values.items()}


def dft_basis(length: int) -> Array:
    """Real and imaginary rows of the DFT of `length` samples, times a periodic Hann window.

    [2 (length/2 + 1), 1, length], the layout with which diffusers' CausalSTFT convolves.
    """
    time = np.arange(length)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * time / length)
    phase = 2 * np.pi * np.outer(np.arange(length // 2 + 1), time) / length
    basis: Array = (np.concatenate([np.cos(phase), -np.sin(phase)]) * window)[:, None, :]
    return basis


def mel_basis(num_bins: int, num_freqs: int, sample_rate: int = 16000) -> Array:
    """Triangular filters, evenly spaced on the mel scale 2595 log10(1 + f/700), from 0 Hz to Nyquist.

    [num_bins, num_freqs]; each row sums to 1. A filter narrower than the frequency grid is widened to it, so
    that no row is empty.
    """
    nyquist = sample_rate / 2
    edges = 700 * (10 ** (np.linspace(0, 2595 * math.log10(1 + nyquist / 700), num_bins + 2) / 2595) - 1)
    grid = np.linspace(0, nyquist, num_freqs)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rise = (grid - low) / np.maximum(centre - low, grid[1])
    fall = (high - grid) / np.maximum(high - centre, grid[1])
    filters = np.maximum(np.minimum(rise, fall), 0)
    weights: Array = filters / filters.sum(axis=1, keepdims=True)
    return weights


def _tensor(key: str, shape: tuple[int, ...]) -> Array:
    bank = _bank(key, shape)
    if bank is not None:
        return bank
    value = _vector(key, shape) if len(shape) < 2 or "table" in key else _matrix(key, shape)
    for pattern, (index, shift) in _MARKS:
        if re.fullmatch(pattern, key):
            value[index] += shift
    return value


def _bank(key: str, shape: tuple[int, ...]) -> Array | None:
    """The filters that are not weights: anti-aliasing, DFT and mel."""
    if key.endswith(".filter"):
        filters: Array = UpSample1d(ratio=2, kernel_size=shape[-1]).filter.double().numpy()
        return filters
    if key.endswith((".forward_basis", ".inverse_basis")):
        return dft_basis(shape[-1])
    if key.endswith(".mel_basis"):
        return mel_basis(*shape)
    return None


def _vector(key: str, shape: tuple[int, ...]) -> Array:
    mean, std = _first(_VECTORS, key)
    value: Array = mean + std * _normal(key, shape)
    return value


def _matrix(key: str, shape: tuple[int, ...]) -> Array:
    value: Array = _normal(key, shape) * _first(_GAINS, key) / math.sqrt(math.prod(shape[1:]))
    if re.fullmatch(r"vocoder\..*conv_out\.weight", key):  # a waveform has no constant part
        value -= value.mean(axis=2, keepdims=True)
    sub_positions, gain = _first(_FOLDS, key)
    if gain:
        centre: tuple[Any, ...] = (..., *(size // 2 for size in shape[2:]))
        value[centre] += gain * _fold(shape[0] // sub_positions, shape[1]).repeat(sub_positions, axis=0)
    return value


def _fold(num_out: int, num_in: int) -> Array:
    """Input i to the outputs that equal it modulo the smaller count; keeps the variance of white inputs."""
    period = min(num_out, num_in)
    match = (np.arange(num_out)[:, None] - np.arange(num_in)[None, :]) % period == 0
    fold: Array = match / np.sqrt(match.sum(axis=1, keepdims=True))
    return fold


def _normal(key: str, shape: tuple[int, ...]) -> Array:
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=seed)).standard_normal(shape)


def _first(table: tuple[tuple[str, T], ...], key: str) -> T:
    return next(value for pattern, value in table if re.fullmatch(pattern, key))
