"""The conditioning of one prompt: a table of one row, shared by all samples of its group.

| column | type | |
|---|---|---|
| `video_context` | fixed_shape_tensor [T, D_v] | what the video branch attends to, after the connectors |
| `audio_context` | fixed_shape_tensor [T, D_a] | what the audio branch attends to, after the connectors |
| `text_mask` | fixed_shape_tensor [T], uint8 | 1 where a token is attended to |

and `negative_video_context`, `negative_audio_context`, `negative_text_mask`, all three or none: those of the
negative prompt, where guidance needs them.

This module knows no torch and no text encoder, and passes the manifest on without reading it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.arrow import Array, manifest_of, read_tensor, table_of, tensor_column, torch_dtype_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditioningView:
    """What `read_conditioning` reads: read-only arrays over the table's memory. T text tokens."""

    video_context: Array
    """[T, D_v], the bits of `torch_dtype` (uint16 for bfloat16)."""
    audio_context: Array
    """[T, D_a], likewise."""
    text_mask: Array
    """uint8 [T], 1 where a token is attended to."""
    negative_video_context: Array | None
    """[T, D_v] of the negative prompt; None where there is none."""
    negative_audio_context: Array | None
    """[T, D_a] of the negative prompt; None where there is none."""
    negative_text_mask: Array | None
    """uint8 [T] of the negative prompt; None where there is none."""
    torch_dtype: str
    """Name of the torch dtype that the contexts are meant as."""
    manifest: dict[str, Any]
    """The prompt, and what made the contexts of it."""


def pack_conditioning(
    *,
    video_context: Array,
    audio_context: Array,
    text_mask: Array,
    negative_video_context: Array | None = None,
    negative_audio_context: Array | None = None,
    negative_text_mask: Array | None = None,
    torch_dtype: str,
    manifest: Mapping[str, Any],
) -> pa.Table:
    """The table of one prompt. Contexts: [T, D], bits of `torch_dtype`; masks: bool or uint8 [T]. Nothing is
    copied that is contiguous."""
    columns = _columns("", video_context, audio_context, text_mask, torch_dtype)
    negative = (negative_video_context, negative_audio_context, negative_text_mask)
    if (
        negative_video_context is not None
        and negative_audio_context is not None
        and negative_text_mask is not None
    ):
        columns += _columns(
            "negative_", negative_video_context, negative_audio_context, negative_text_mask, torch_dtype
        )
    else:
        assert negative == (None, None, None), "a negative prompt has both contexts and a mask"
    return table_of(columns, manifest)


def read_conditioning(table: pa.Table) -> ConditioningView:
    """The conditioning in `table`, without copies. Raises ValueError for a table that is none."""
    if table.num_rows != 1:
        raise ValueError(f"a conditioning table must have 1 row, got {table.num_rows}")
    has_negative = "negative_video_context" in table.column_names
    return ConditioningView(
        video_context=read_tensor(table, "video_context")[0],
        audio_context=read_tensor(table, "audio_context")[0],
        text_mask=read_tensor(table, "text_mask")[0],
        negative_video_context=read_tensor(table, "negative_video_context")[0] if has_negative else None,
        negative_audio_context=read_tensor(table, "negative_audio_context")[0] if has_negative else None,
        negative_text_mask=read_tensor(table, "negative_text_mask")[0] if has_negative else None,
        torch_dtype=torch_dtype_of(table, "video_context"),
        manifest=manifest_of(table),
    )


def _columns(
    prefix: str, video_context: Array, audio_context: Array, text_mask: Array, torch_dtype: str
) -> list[tuple[pa.Field, pa.Array]]:
    assert len(video_context) == len(audio_context) == len(text_mask), "one context and mask entry per token"
    mask = text_mask.view(np.uint8) if text_mask.dtype == np.bool_ else text_mask
    return [
        tensor_column(f"{prefix}video_context", video_context[None], torch_dtype),
        tensor_column(f"{prefix}audio_context", audio_context[None], torch_dtype),
        tensor_column(f"{prefix}text_mask", mask[None], "uint8"),
    ]
