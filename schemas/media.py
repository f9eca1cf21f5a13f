"""The media of one sample: two tables, since a video has a row per frame and a waveform has not.

* `"video"`: column `frames`, uint8 [H, W, 3] a row, RGB; manifest key `frame_rate`, frames per second.
* `"audio"`: column `waveform`, float32 [channels, N], one row; manifest key `sample_rate`, samples per
  second.

Both manifests hold what else is known of the sample. This module knows no codec and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from schemas.arrow import Array, manifest_of, read_tensor, table_of, tensor_column


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaView:
    """What `read_media` reads: read-only arrays over the tables' memory."""

    frames: Array
    """uint8 [F, H, W, 3], RGB."""
    frame_rate: float
    """Frames per second."""
    waveform: Array
    """float32 [channels, N], in [-1, 1]."""
    sample_rate: int
    """Samples per second."""
    manifest: dict[str, Any]
    """The video's manifest."""


def pack_media(
    frames: Array,
    frame_rate: float,
    waveform: Array,
    sample_rate: int,
    manifest: Mapping[str, Any],
) -> dict[str, pa.Table]:
    """The tables of `frames`, uint8 [F, H, W, 3], and `waveform`, float32 [channels, N]; nothing is copied
    that is contiguous."""
    assert frames.ndim == 4 and frames.shape[3] == 3, frames.shape
    assert waveform.ndim == 2, waveform.shape
    video, audio = (
        tensor_column("frames", frames, "uint8"),
        tensor_column("waveform", waveform[None], "float32"),
    )
    return {
        "video": table_of([video], {**manifest, "frame_rate": frame_rate}),
        "audio": table_of([audio], {**manifest, "sample_rate": sample_rate}),
    }


def read_media(media: Mapping[str, pa.Table]) -> MediaView:
    """The media in the tables, without copies. Raises ValueError for tables that are none."""
    missing = {"video", "audio"} - set(media)
    if missing:
        raise ValueError(
            f"media must have the tables video and audio, but {' and '.join(sorted(missing))} is missing"
        )
    manifest = manifest_of(media["video"])
    return MediaView(
        frames=read_tensor(media["video"], "frames"),
        frame_rate=manifest["frame_rate"],
        waveform=read_tensor(media["audio"], "waveform")[0],
        sample_rate=manifest_of(media["audio"])["sample_rate"],
        manifest=manifest,
    )
