"""Rewards of examples/grpo: what they measure, how they are named, and what is none."""

import math
from typing import Any

import numpy as np
import pytest

from examples.grpo.rewards import PITCH_HZ, REWARDS, RewardWorker, loudness, named, redness
from schemas.media import MediaView, pack_media, read_media

SAMPLE_RATE = 48_000


def media(color: tuple[int, int, int] = (0, 0, 0), *tones: tuple[float, float]) -> MediaView:
    """A picture of one color, and a sum of tones (frequency, amplitude) in both channels."""
    time = np.arange(SAMPLE_RATE // 3) / SAMPLE_RATE
    sound = sum(amplitude * np.sin(2 * np.pi * frequency * time) for frequency, amplitude in tones)
    waveform = np.broadcast_to(np.float32(sound), (2, len(time))).copy()
    frames = np.broadcast_to(np.uint8(color), (3, 4, 6, 3)).copy()
    return read_media(pack_media(frames, 24.0, waveform, SAMPLE_RATE, {}))


def test_redness_is_that_of_the_color() -> None:
    assert redness(media((255, 0, 0))) == 1.0
    assert redness(media((0, 255, 0))) == -0.5
    assert redness(media((90, 90, 90))) == pytest.approx(0)


def test_loudness_is_the_level_at_the_pitch_and_nowhere_else() -> None:
    assert loudness(media((0, 0, 0), (PITCH_HZ, 1.0))) == pytest.approx(0, abs=0.3)
    half = loudness(media((0, 0, 0), (PITCH_HZ, 0.5), (3 * PITCH_HZ, 0.9)))
    assert half == pytest.approx(20 * math.log10(0.5), abs=0.3)
    assert loudness(media((0, 0, 0), (2 * PITCH_HZ, 1.0))) < -50
    assert loudness(media()) == pytest.approx(-120)


def test_a_reward_of_ones_own_is_named_by_its_module() -> None:
    assert named("redness") is REWARDS["redness"]
    assert named("examples.grpo.rewards:loudness") is loudness
    with pytest.raises(ValueError, match=r"redness, loudness or .*, got 'blueness'"):
        named("blueness")


def test_a_worker_gives_each_modality_its_reward() -> None:
    tables = pack_media(
        np.full((1, 2, 2, 3), 50, np.uint8), 24.0, np.zeros((2, 4800), np.float32), 48_000, {}
    )
    worker = RewardWorker({"video": "redness", "audio": "loudness"})
    assert worker.score(tables) == {"video": 0.0, "audio": pytest.approx(-120)}


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.5"])
def test_what_is_no_number_is_no_reward(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = RewardWorker({"video": "redness", "audio": "loudness"})
    monkeypatch.setitem(worker.rewards, "audio", lambda _: value)
    tables = pack_media(np.zeros((1, 2, 2, 3), np.uint8), 24.0, np.zeros((2, 4800), np.float32), 48_000, {})
    with pytest.raises(
        ValueError, match=f"audio_reward: 'loudness' must return a finite number, got {value!r}"
    ):
        worker.score(tables)
