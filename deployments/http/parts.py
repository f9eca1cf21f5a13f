"""Parts of a settled rollout: tables and files of one sample, or the reason why there is none.

It knows which part is where and nothing of routes.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

from deployments.http.bodies import Encoded, arrow_stream
from deployments.http.encoder import Encoder
from deployments.http.problems import missing
from deployments.kept.api import Settled, SettledSample
from pipeline.export import mp4_bytes, png_bytes, wav_bytes
from schemas.errors import Problem
from schemas.group_stream import group_batches, group_schema

MediaTables = Mapping[str, pa.Table]
MP4, WAV, PNG = "video/mp4", "audio/wav", "image/png"


def some_done(settled: Settled) -> Settled:
    """The rollout. Raises the first sample's Problem when no sample was done."""
    problems = [sample["problem"] for sample in settled["samples"] if sample["problem"] is not None]
    if len(problems) == len(settled["samples"]):
        raise Problem(**problems[0]).exception()
    return settled


def done_sample(settled: Settled, index: int) -> SettledSample:
    """One sample. Raises Refusal (404) where there is no such sample, and its Problem where it failed."""
    count = len(settled["samples"])
    if not 0 <= index < count:
        raise missing("sample", index, f"must be 0 to {count - 1} in this rollout", f"use {count - 1}")
    sample = settled["samples"][index]
    if sample["problem"] is not None:
        raise Problem(**sample["problem"]).exception()
    return sample


async def trajectory_parts(settled: Settled, index: int) -> list[memoryview]:
    """A sample's trajectory as an Arrow IPC stream. Raises as `done_sample` and where none was asked for."""
    ref = done_sample(settled, index)["trajectory"]
    if ref is None:
        raise _not_asked_for("trajectory")
    return _stream(await ref)


async def conditioning_parts(settled: Settled) -> list[memoryview]:
    """The conditioning as an Arrow IPC stream. Raises Refusal (404) where the prompt was not encoded."""
    if settled["conditioning"] is None:
        raise missing(
            "conditioning", None, "is not there: the prompt was not encoded", "submit the request again"
        )
    return _stream(await settled["conditioning"])


async def group_parts(settled: Settled) -> list[memoryview]:
    """The trajectories of all samples that were done, as one Arrow IPC stream (`schemas.group_stream`)."""
    if not settled["request"]["trajectory"]:
        raise _not_asked_for("trajectory")
    refs = {
        sample["sample_index"]: sample["trajectory"] for sample in settled["samples"] if not sample["problem"]
    }
    problems = {
        sample["sample_index"]: sample["problem"] for sample in settled["samples"] if sample["problem"]
    }
    tables = dict(zip(refs, await asyncio.gather(*map(_value, refs.values())), strict=True))
    schema = group_schema(tables, settled["request"], problems)
    return arrow_stream(schema, group_batches(tables, schema))


class Media:
    """Files of samples, encoded when they are asked for."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    async def mp4(self, settled: Settled, index: int) -> Encoded:
        """Picture and sound. Raises as `done_sample`, and where no media was asked for."""
        return await self._encoded(settled, index, mp4_bytes, MP4)

    async def wav(self, settled: Settled, index: int) -> Encoded:
        """The sound. Raises likewise."""
        return await self._encoded(settled, index, wav_bytes, WAV)

    async def png(self, settled: Settled, index: int, frame: int) -> Encoded:
        """One frame. Raises likewise, and Refusal (404) for a frame that is not there."""
        count = (await _media(settled, index))["video"].num_rows
        if not 0 <= frame < count:
            raise missing("frame", frame, f"must be 0 to {count - 1} in this rollout", f"use {count - 1}")
        return await self._encoded(settled, index, partial(png_bytes, frame=frame), PNG, frame)

    async def _encoded(
        self, settled: Settled, index: int, make: Callable[[MediaTables], bytes], *key: str | int
    ) -> Encoded:
        media = await _media(settled, index)
        return await self._encoder.encoded((settled["group_id"], index, *key), lambda: make(media))


async def _media(settled: Settled, index: int) -> MediaTables:
    ref = done_sample(settled, index)["media"]
    if ref is None:
        raise _not_asked_for("media")
    media: MediaTables = await ref
    return media


async def _value(ref: Any) -> Any:
    return await ref


def _stream(table: pa.Table) -> list[memoryview]:
    return arrow_stream(table.schema, table.to_batches())


def _not_asked_for(part: str) -> Exception:
    return missing(part, False, "was not asked for", f"submit a request with {part} true")
