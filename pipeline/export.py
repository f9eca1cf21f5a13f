"""Media of a sample as files that people can open: H.264 and AAC in an MP4, the sound as WAV, a frame as PNG.

Nothing is cut, stretched or resampled: both start at 0, the picture lasts num_frames / frame_rate seconds and the sound
as long as its waveform. It knows no checkpoint and no torch, and reads no manifest beyond the two rates.
"""

import struct
import tempfile
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

from schemas.media import MediaView, read_media

X264_OPTIONS = {"crf": "18", "preset": "medium"}
"""Visually close to the frames, at a few percent of their size."""
AAC_BITS_PER_S = 192_000
LAYOUTS = {1: "mono", 2: "stereo"}
IEEE_FLOAT = 3
"""WAV's number for float samples."""
MAX_RATE_DENOMINATOR = 1001
"""Frame rates are numbers such as 24, 12.5 or 24000/1001."""


def save_mp4(media: Mapping[str, pa.Table], path: str | Path) -> None:
    """Write a sample's media tables (`schemas.media`) to ``path``, whose folder must exist.

    Raises ValueError for tables that are no media, for a side with an odd number of pixels, which H.264 cannot halve,
    and for sound that is neither mono nor stereo.
    """
    view = read_media(media)
    _check(view)
    rate = Fraction(view.frame_rate).limit_denominator(MAX_RATE_DENOMINATOR)
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        picture, sound = _picture_stream(container, view, rate), _sound_stream(container, view)
        written = 0
        for index, frame in enumerate(view.frames):
            container.mux(picture.encode(_picture(frame, index, rate)))
            # In turns, so that no player has to look far ahead for the sound of a picture.
            is_last = index + 1 == len(view.frames)
            end = view.waveform.shape[1] if is_last else int((index + 1) * view.sample_rate / rate)
            chunk = view.waveform[:, written:end]
            if chunk.size:
                container.mux(sound.encode(_sound(chunk, written, view)))
            written += chunk.shape[1]
        for stream in (picture, sound):
            container.mux(stream.encode())


def mp4_bytes(media: Mapping[str, pa.Table]) -> bytes:
    """What `save_mp4` writes. Raises likewise."""
    # On disk meanwhile: the muxer goes back to put the index first, for players that have only the beginning.
    with tempfile.TemporaryDirectory(prefix="ltx-mp4-") as folder:
        path = Path(folder) / "sample.mp4"
        save_mp4(media, path)
        return path.read_bytes()


def wav_bytes(media: Mapping[str, pa.Table]) -> bytes:
    """The sound as WAV of 32-bit float samples: the waveform's own, not rounded. Raises ValueError for tables that are no
    media."""
    view = read_media(media)
    num_channels, num_samples = view.waveform.shape
    frame_bytes = 4 * num_channels
    layout = struct.pack(
        "<HHIIHHH",
        IEEE_FLOAT,
        num_channels,
        view.sample_rate,
        view.sample_rate * frame_bytes,
        frame_bytes,
        32,
        0,
    )
    samples = np.ascontiguousarray(view.waveform.T, "<f4").tobytes()
    chunks = [(b"fmt ", layout), (b"fact", struct.pack("<I", num_samples)), (b"data", samples)]
    body = b"".join(name + struct.pack("<I", len(chunk)) + chunk for name, chunk in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def png_bytes(media: Mapping[str, pa.Table], frame: int) -> bytes:
    """One frame as PNG, pixel by pixel. Raises ValueError for tables that are no media."""
    rgb = read_media(media).frames[frame]
    encoder = av.CodecContext.create("png", "w")
    encoder.height, encoder.width, _ = rgb.shape
    encoder.pix_fmt, encoder.time_base = "rgb24", Fraction(1)
    picture = av.VideoFrame.from_ndarray(rgb, format="rgb24")
    packets = [*encoder.encode(picture), *encoder.encode(None)]
    return b"".join(bytes(packet) for packet in packets)


def _check(view: MediaView) -> None:
    _, height, width, _ = view.frames.shape
    if height % 2 or width % 2:
        raise ValueError(
            f"frames must have even sides for H.264, got {height} x {width}; crop them by a pixel"
        )
    if len(view.waveform) not in LAYOUTS:
        raise ValueError(f"waveform must have 1 or 2 channels, got {len(view.waveform)}; mix them down")


def _picture_stream(container: Any, view: MediaView, rate: Fraction) -> Any:
    stream = container.add_stream("libx264", rate=rate, options=X264_OPTIONS)
    _, stream.height, stream.width, _ = view.frames.shape
    stream.pix_fmt = "yuv420p"
    # Said in the file, since players take a guess by size else: BT.601 for small pictures, BT.709 for large ones.
    context = stream.codec_context
    context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
    return stream


def _sound_stream(container: Any, view: MediaView) -> Any:
    stream = container.add_stream("aac", rate=view.sample_rate, layout=LAYOUTS[len(view.waveform)])
    stream.bit_rate = AAC_BITS_PER_S
    return stream


def _picture(rgb: np.ndarray[Any, Any], index: int, rate: Fraction) -> Any:
    frame = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(
        format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
    )
    frame.pts, frame.time_base = index, 1 / rate
    return frame


def _sound(chunk: np.ndarray[Any, Any], start: int, view: MediaView) -> Any:
    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(chunk), format="fltp", layout=LAYOUTS[len(view.waveform)]
    )
    frame.sample_rate = view.sample_rate
    frame.pts, frame.time_base = start, Fraction(1, view.sample_rate)
    return frame
