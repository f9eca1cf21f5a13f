"""Large bodies: Arrow tables over their own memory, media in ranges, both in pieces so that no caller waits for another's.

It knows no rollouts.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from deployments.http.problems import Refusal
from schemas.errors import invalid

ARROW_TYPE = "application/vnd.apache.arrow.stream"
PIECE_BYTES = 256 * 2**10
"""Sent at a time; other callers have their turn in between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A file in memory."""

    content: bytes
    etag: str
    """Quoted; the same for the same bytes, whichever replica made them."""


def arrow_stream(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> list[memoryview]:
    """The bytes of an Arrow IPC stream, in parts: those of the columns are the columns' own memory."""
    sink = _Parts()
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.parts


def arrow_answer(parts: Sequence[memoryview], name: str, headers: dict[str, str]) -> StreamingResponse:
    """An Arrow IPC stream as a file of that name."""
    return StreamingResponse(
        _pieces(parts),
        media_type=ARROW_TYPE,
        headers={
            **headers,
            "Content-Length": str(sum(len(part) for part in parts)),
            "Content-Disposition": f'attachment; filename="{name}"',
        },
    )


def media_answer(
    request: Request, encoded: Encoded, media_type: str, name: str, headers: dict[str, str]
) -> Response:
    """A file, or the range of it that is asked for; for HEAD its headers. Raises Refusal (416) for one that it does not have."""
    size, content = len(encoded.content), memoryview(encoded.content)
    found = _range(request, encoded.etag, size)
    headers = {
        **headers,
        "Accept-Ranges": "bytes",
        "ETag": encoded.etag,
        "Content-Disposition": f'inline; filename="{name}"',
    }
    if found is not None:
        first, last = found
        content = content[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    headers["Content-Length"] = str(len(content))
    status = 200 if found is None else 206
    if request.method == "HEAD":
        return Response(status_code=status, media_type=media_type, headers=headers)
    return StreamingResponse(_pieces([content]), status_code=status, media_type=media_type, headers=headers)


async def _pieces(parts: Sequence[memoryview]) -> AsyncIterator[bytes]:
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            yield bytes(part[start : start + PIECE_BYTES])
            await asyncio.sleep(0)


def _range(request: Request, etag: str, size: int) -> tuple[int, int] | None:
    """First and last byte that are asked for; None for all: where no range is asked for, or one of another unit,
    several, one that makes no sense, or one of an earlier file (RFC 9110, 14.2)."""
    if request.method != "GET":
        return None
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", "").replace(" ", ""))
    is_same = request.headers.get("if-range", etag) == etag
    if asked is None or not is_same or not any(asked.groups()):
        return None
    # Numbers of more digits than any file has bytes; int() refuses thousands of them.
    first, last = (int(number.lstrip("0")[:19] or 0) if number else None for number in asked.groups())
    if first is None:
        assert last is not None
        first, last = (max(0, size - last), size - 1) if last else (size, size)
    elif last is None:
        last = size - 1
    elif last < first:
        return None
    if first >= size:
        rule = f"must begin before the end, byte {size}"
        problem = invalid("Range", request.headers["range"], rule, f"use bytes=0-{size - 1}")
        raise Refusal(416, problem, {"Content-Range": f"bytes */{size}"})
    return first, min(last, size - 1)


class _Parts:
    """A file for Arrow to write to, which keeps what it is given without copying it."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[memoryview] = []

    def write(self, part: Any) -> int:
        self.parts.append(memoryview(part).cast("B"))
        return len(part)

    def tell(self) -> int:
        return sum(len(part) for part in self.parts)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
