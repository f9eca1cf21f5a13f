"""Rewards are plain functions of a sample's media: frames and waveform in, a number out, more is better.

Name your own as "package.module:function", in the repository, which travels to the workers; what it loads, let it keep with
functools.cache. The prompt is in `media.manifest["request"]`. Workers score them in processes of their own: a worker is given the reference
to a sample's media, fetches it from the object store, and sends numbers back, so no picture passes through the trainer.
"""

import math
import pkgutil
from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from schemas.media import MediaView, read_media

Reward = Callable[[MediaView], float]

PITCH_HZ = 440.0
SILENCE = 1e-6
"""Amplitude below which quiet is quiet, -120 dB."""


def redness(media: MediaView) -> float:
    """How much more red than green and blue the picture is, in [-1, 1]."""
    red, green, blue = media.frames.mean(axis=(0, 1, 2)) / 255
    return float(red - (green + blue) / 2)


def loudness(media: MediaView, pitch_hz: float = PITCH_HZ) -> float:
    """Level in dB of the sound within a sixth of an octave around a pitch; 0 is as loud as a full-scale sine there."""
    sound = media.waveform.mean(axis=0)
    window = np.hanning(len(sound))
    amplitudes = 2 * np.abs(np.fft.rfft(sound * window)) / window.sum()
    frequencies = np.fft.rfftfreq(len(sound), 1 / media.sample_rate)
    near = np.abs(np.log2(np.maximum(frequencies, SILENCE) / pitch_hz)) < 1 / 6
    # A sine of a Hann window's width spreads over several bins, of which the energies add up to 1.5.
    amplitude = np.sqrt(np.square(amplitudes[near]).sum() / 1.5)
    return float(20 * np.log10(amplitude + SILENCE))


REWARDS: Mapping[str, Reward] = {"redness": redness, "loudness": loudness}


def named(name: str) -> Reward:
    """The reward of that name: one of REWARDS, or "package.module:function". Raises ValueError where there is none."""
    try:
        found = REWARDS[name] if name in REWARDS else pkgutil.resolve_name(name)
        if not callable(found):
            raise TypeError("it is no function")
    except (ImportError, AttributeError, TypeError, ValueError) as wrong:
        raise ValueError(
            f"a reward must be one of {', '.join(REWARDS)} or 'package.module:function', got {name!r}: {wrong}"
        ) from wrong
    reward: Reward = found
    return reward


class RewardWorker:
    """Scores one sample at a time. As an actor, it is called with the ref of a sample's media."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self.rewards = {modality: named(name) for modality, name in names.items()}

    def score(self, media: Mapping[str, pa.Table]) -> dict[str, float]:
        """A reward for each modality. Raises ValueError, with the names of both, for what is no finite number."""
        view = read_media(media)
        return {modality: self._number(modality, reward(view)) for modality, reward in self.rewards.items()}

    def _number(self, modality: str, value: object) -> float:
        if not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
            name = self.names[modality]
            raise ValueError(f"{modality}_reward: {name!r} must return a finite number, got {value!r}")
        return float(value)
