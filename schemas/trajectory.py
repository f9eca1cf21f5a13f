"""The trajectory of one sample: a table with a row per kept state, in rising order of steps.

| column | type | |
|---|---|---|
| `step` | int32 | k: the state is the one before step k |
| `sigma` | float32 | noise level of the state; 0 in the last row |
| `video_latents`, `audio_latents` | fixed_shape_tensor [L, C] | the state, packed into tokens |
| `log_prob_video`, `log_prob_audio` | float32, nullable | of step k, mean per element; null where it moved by ode |

The last row, step = num_steps, is the state that is decoded, and has no log-probs. What else a trainer must
know to reproduce the sample or to reject it stands in the manifest, which this module passes on without
reading it, save for `schema_version`.

It knows no torch: `pipeline.tensors` makes tensors of what is read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.arrow import (
    Array,
    manifest_of,
    read_numbers,
    read_tensor,
    table_of,
    tensor_column,
    torch_dtype_of,
)

SCHEMA_VERSION = 1
"""Of the columns and the manifest's keys. A reader refuses a version it does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryView:
    """What `read_trajectory` reads: R kept states, as read-only arrays over the table's memory."""

    steps: Array
    """int32 [R], rising."""
    sigmas: Array
    """float32 [R], falling."""
    video_latents: Array
    """[R, L_v, C_v], the bits of `state_dtype` (uint16 for bfloat16)."""
    audio_latents: Array
    """[R, L_a, C_a], likewise."""
    log_prob_video: tuple[float | None, ...]
    """R values, None where the video did not move stochastically."""
    log_prob_audio: tuple[float | None, ...]
    """R values, None where the audio did not move stochastically."""
    state_dtype: str
    """Name of the torch dtype that the latents are meant as."""
    manifest: dict[str, Any]
    """The rest of what is known of the sample."""

    def row_of(self, step: int) -> int:
        """Index of the row of state `step`. Raises ValueError for a state that was not kept."""
        rows = np.flatnonzero(self.steps == step)
        if rows.size == 0:
            raise ValueError(
                f"state {step} was not kept, only {self.steps.tolist()} were; name it in return_steps"
            )
        return int(rows[0])


def pack_trajectory(
    *,
    steps: Sequence[int],
    sigmas: Sequence[float],
    video_latents: Array,
    audio_latents: Array,
    log_prob_video: Sequence[float | None],
    log_prob_audio: Sequence[float | None],
    state_dtype: str,
    manifest: Mapping[str, Any],
) -> pa.Table:
    """The table of R kept states. Latents: [R, L, C], bits of `state_dtype`, not copied where contiguous."""
    rows = len(steps)
    lengths = [len(x) for x in (sigmas, video_latents, audio_latents, log_prob_video, log_prob_audio)]
    assert lengths == [rows] * 5, (rows, lengths)
    assert all(before < after for before, after in pairwise(steps)), steps
    assert all(x is None or math.isfinite(x) for x in (*log_prob_video, *log_prob_audio)), (
        "log-probs not finite"
    )
    columns = [
        (pa.field("step", pa.int32(), nullable=False), pa.array(steps, pa.int32())),
        (pa.field("sigma", pa.float32(), nullable=False), pa.array(sigmas, pa.float32())),
        tensor_column("video_latents", video_latents, state_dtype),
        tensor_column("audio_latents", audio_latents, state_dtype),
        (pa.field("log_prob_video", pa.float32()), pa.array(log_prob_video, pa.float32())),
        (pa.field("log_prob_audio", pa.float32()), pa.array(log_prob_audio, pa.float32())),
    ]
    return table_of(columns, {**manifest, "schema_version": SCHEMA_VERSION})


def read_trajectory(table: pa.Table) -> TrajectoryView:
    """The trajectory in `table`, or in a slice of one, without copies.

    Raises ValueError for a table of another schema version, or that is no trajectory.
    """
    manifest = manifest_of(table)
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version must be {SCHEMA_VERSION}, got {version}; read it with the release that wrote it"
        )
    return TrajectoryView(
        steps=read_numbers(table, "step"),
        sigmas=read_numbers(table, "sigma"),
        video_latents=read_tensor(table, "video_latents"),
        audio_latents=read_tensor(table, "audio_latents"),
        log_prob_video=tuple(table.column("log_prob_video").to_pylist()),
        log_prob_audio=tuple(table.column("log_prob_audio").to_pylist()),
        state_dtype=torch_dtype_of(table, "video_latents"),
        manifest=manifest,
    )
