"""Files of a sample read back: what was written is what is there."""

import io
import tempfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.export import mp4_bytes, png_bytes, save_mp4, wav_bytes
from schemas.media import pack_media

AAC_FRAME = 1024
"""Samples; a decoder gives back whole frames, the last one filled up with silence."""


def ramp(num_frames: int) -> NDArray[np.uint8]:
    """Frames [F, 32, 64, 3] whose left half grows brighter and whose right half is of one colour."""
    frames = np.empty((num_frames, 32, 64, 3), np.uint8)
    frames[:, :, :32] = np.linspace(20, 230, num_frames).astype(np.uint8)[:, None, None, None]
    frames[:, :, 32:] = (200, 60, 40)
    return frames


def click(num_channels: int, num_samples: int, sample_rate: int, at: int) -> NDArray[np.float32]:
    """Silence, and from sample ``at`` on a tone; a different one in each channel."""
    seconds = np.arange(num_samples) / sample_rate
    tones = [np.sin(2 * np.pi * 440 * (channel + 1) * seconds) for channel in range(num_channels)]
    wave = 0.5 * np.stack(tones).astype(np.float32)
    wave[:, :at] = 0
    return wave


def decoded(path: Path) -> tuple[Any, Any, NDArray[np.uint8], NDArray[np.float32]]:
    """Both streams, all frames as RGB and all sound."""
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        pictures = [frame for frame in container.decode(video=0)]
        container.seek(0)
        sounds = [frame for frame in container.decode(audio=0)]
        times = [frame.time for frame in pictures]
        assert times == pytest.approx([index / video.average_rate for index in range(len(times))], abs=1e-6)
        return (
            video,
            audio,
            np.stack([frame.to_ndarray(format="rgb24") for frame in pictures]),
            np.concatenate([frame.to_ndarray() for frame in sounds], axis=1),
        )


@pytest.mark.parametrize(
    ("num_frames", "frame_rate", "num_channels", "sample_rate"),
    [(9, 24.0, 2, 48000), (25, 12.5, 2, 24000), (17, 23.976, 1, 16000), (1, 24.0, 2, 48000)],
)
def test_an_mp4_has_every_frame_at_its_time_and_all_of_the_sound(
    tmp_path: Path, num_frames: int, frame_rate: float, num_channels: int, sample_rate: int
) -> None:
    frames = ramp(num_frames)
    wave = click(num_channels, int(num_frames / frame_rate * sample_rate) - 37, sample_rate, at=0)
    save_mp4(pack_media(frames, frame_rate, wave, sample_rate, {}), tmp_path / "sample.mp4")

    video, audio, pictures, sound = decoded(tmp_path / "sample.mp4")
    assert (video.codec_context.name, audio.codec_context.name) == ("h264", "aac")
    assert float(video.average_rate) == pytest.approx(frame_rate)
    assert float(video.duration * video.time_base) == pytest.approx(num_frames / frame_rate, abs=1e-3)
    assert (audio.rate, audio.channels) == (sample_rate, num_channels)
    assert float(audio.duration * audio.time_base) == pytest.approx(wave.shape[1] / sample_rate, abs=2e-3)
    assert pictures.shape == frames.shape
    assert 0 <= sound.shape[1] - wave.shape[1] < AAC_FRAME


def test_sound_and_picture_are_in_step(tmp_path: Path) -> None:
    frames = np.zeros((49, 32, 32, 3), np.uint8)
    frames[24:] = 255
    wave = click(2, 98000, 48000, at=48000)
    save_mp4(pack_media(frames, 24.0, wave, 48000, {}), tmp_path / "sample.mp4")

    _, _, pictures, sound = decoded(tmp_path / "sample.mp4")
    brightness = pictures.mean(axis=(1, 2, 3))
    assert np.argmax(brightness > 128) == 24
    onset = np.argmax(np.abs(sound[0]) > 0.2)
    assert onset == pytest.approx(48000, abs=48)  # a millisecond; the encoder's own delay is 21 of them


def test_colours_come_back(tmp_path: Path) -> None:
    frames = ramp(9)
    save_mp4(pack_media(frames, 24.0, click(2, 18000, 48000, at=0), 48000, {}), tmp_path / "sample.mp4")

    video, _, pictures, _ = decoded(tmp_path / "sample.mp4")
    error = np.abs(pictures.astype(int) - frames.astype(int))[:, 4:-4, 4:28]
    assert error.max() <= 4
    assert np.abs(pictures[:, 4:-4, 36:-4].mean(axis=(0, 1, 2)) - (200, 60, 40)).max() <= 3
    assert video.codec_context.colorspace == av.video.reformatter.Colorspace.ITU709


def test_sound_longer_than_the_picture_is_kept_whole(tmp_path: Path) -> None:
    wave = click(2, 48000, 48000, at=0)
    save_mp4(pack_media(ramp(9), 24.0, wave, 48000, {}), tmp_path / "sample.mp4")

    _, _, pictures, sound = decoded(tmp_path / "sample.mp4")
    assert len(pictures) == 9
    assert 0 <= sound.shape[1] - 48000 < AAC_FRAME


@pytest.mark.parametrize(
    ("shape", "num_channels", "message"),
    [((9, 33, 32, 3), 2, "even sides for H.264, got 33 x 32"), ((9, 32, 32, 3), 6, "1 or 2 channels, got 6")],
)
def test_what_an_mp4_cannot_hold_is_refused(
    tmp_path: Path, shape: tuple[int, ...], num_channels: int, message: str
) -> None:
    wave = click(num_channels, 18000, 48000, at=0)
    with pytest.raises(ValueError, match=message):
        save_mp4(pack_media(np.zeros(shape, np.uint8), 24.0, wave, 48000, {}), tmp_path / "sample.mp4")


def test_an_mp4_in_memory_is_the_file_and_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    media = pack_media(ramp(9), 24.0, click(2, 18000, 48000, at=0), 48000, {})
    content = mp4_bytes(media)
    assert list(tmp_path.iterdir()) == []
    save_mp4(media, tmp_path / "sample.mp4")
    assert content == (tmp_path / "sample.mp4").read_bytes()
    assert content.index(b"moov") < content.index(b"mdat"), "a player can begin before it has all"


@pytest.mark.parametrize(("num_channels", "sample_rate"), [(1, 16000), (2, 48000), (6, 48000)])
def test_a_wav_holds_the_waveform_itself(num_channels: int, sample_rate: int) -> None:
    wave = click(num_channels, 1001, sample_rate, at=0)
    content = wav_bytes(pack_media(ramp(1), 24.0, wave, sample_rate, {}))
    assert int.from_bytes(content[4:8], "little") == len(content) - 8
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.audio[0]
        assert (stream.codec_context.name, stream.rate) == ("pcm_f32le", sample_rate)
        sound = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    assert np.array_equal(sound.reshape(-1, num_channels).T, wave)


def test_a_png_holds_the_frame_itself() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (3, 33, 47, 3), np.uint8)
    media = pack_media(frames, 24.0, click(2, 6000, 48000, at=0), 48000, {})
    with av.open(io.BytesIO(png_bytes(media, 1))) as container:
        (picture,) = container.decode(video=0)
    assert np.array_equal(picture.to_ndarray(format="rgb24"), frames[1])
