"""msgpack with tensors in it, as SGLang's rollout API writes it: a tensor is the map

    {"__tensor__": true, "data": <a safetensors file with one tensor, "t">, "shape": [...], "dtype": "torch.float32"}

A body is written piece by piece, so that gigabytes of it are never in memory beside the arrays that they come from.

This module knows no field of an answer, and no torch: a tensor is bytes with the name of a torch dtype.

Invariant: the pieces together are what `msgpack.packb` makes of the same maps with `safetensors.torch.save` in them.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import msgpack
import numpy as np

from schemas.arrow import Array
from schemas.errors import invalid

PIECE_BYTES = 2**18
"""Of a piece, about: what a slow reader holds up, and what is copied at a time."""
MAX_BIN_BYTES = 2**32 - 1
"""msgpack counts the bytes of a binary in 32 bits."""

DTYPES = {
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "uint8": ("U8", 1),
}
"""By torch name: safetensors' name, and bytes of an element."""

Piece = bytes | memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class WireTensor:
    """A tensor on its way out."""

    dtype: str
    """Its torch name."""
    shape: tuple[int, ...]
    """Its sizes."""
    parts: Callable[[], Iterator[Array]]
    """Arrays whose bytes, one after the other, are the tensor's: made as they are written."""

    @property
    def num_bytes(self) -> int:
        """Of the tensor alone."""
        return prod(self.shape) * DTYPES[self.dtype][1]


def tensor(values: Array, dtype: str | None = None) -> WireTensor:
    """The tensor of an array, which holds the bits of `dtype` (its own, where that is left out). Not copied where
    contiguous."""
    name = dtype or str(values.dtype)
    assert values.dtype.itemsize == DTYPES[name][1], (values.dtype, name)
    return WireTensor(dtype=name, shape=values.shape, parts=lambda: iter([values]))


def pieces(value: Any) -> Iterator[bytes]:
    """msgpack of `value`: maps with text keys, lists, scalars and tensors. Raises ValueError (a Problem), before the
    first piece, for a tensor of 4 GiB or more."""
    _check(value)
    return _joined(_written(value, msgpack.Packer()))


def _joined(written: Iterator[Piece]) -> Iterator[bytes]:
    """The same in pieces of much the same size."""
    waiting = bytearray()
    for piece in written:
        waiting += piece
        if len(waiting) >= PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)


def _check(value: Any) -> None:
    if isinstance(value, WireTensor):
        if len(_header(value)) + value.num_bytes > MAX_BIN_BYTES:
            rule = "must have less than 4 GiB, as every binary in msgpack"
            remedy = "ask for fewer states or smaller pictures, or read it as Arrow from /v1/rollouts"
            raise invalid(
                None, f"{list(value.shape)} of {value.dtype}", f"a tensor {rule}", remedy
            ).exception()
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check(item)


def _written(value: Any, packer: msgpack.Packer) -> Iterator[Piece]:
    if isinstance(value, WireTensor):
        yield from _written_tensor(value, packer)
    elif isinstance(value, dict):
        yield packer.pack_map_header(len(value))
        for key, item in value.items():
            yield packer.pack(key)
            yield from _written(item, packer)
    elif isinstance(value, list):
        yield packer.pack_array_header(len(value))
        for item in value:
            yield from _written(item, packer)
    else:
        yield packer.pack(value)


def _written_tensor(value: WireTensor, packer: msgpack.Packer) -> Iterator[Piece]:
    header = _header(value)
    yield packer.pack_map_header(4)
    yield packer.pack("__tensor__") + packer.pack(True) + packer.pack("data")
    yield _bin_header(len(header) + value.num_bytes) + header
    written = 0
    for part in value.parts():
        raw = memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
        written += len(raw)
        yield from (raw[start : start + PIECE_BYTES] for start in range(0, len(raw), PIECE_BYTES))
    assert written == value.num_bytes, (written, value.shape, value.dtype)
    yield packer.pack("shape") + packer.pack(list(value.shape))
    yield packer.pack("dtype") + packer.pack(f"torch.{value.dtype}")


def _header(value: WireTensor) -> bytes:
    """What stands before a tensor's bytes in a safetensors file: the length of a JSON object, and it, padded to 8."""
    entry = {
        "dtype": DTYPES[value.dtype][0],
        "shape": list(value.shape),
        "data_offsets": [0, value.num_bytes],
    }
    text = json.dumps({"t": entry}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bin_header(num_bytes: int) -> bytes:
    """The shortest of msgpack's three ways to begin a binary."""
    if num_bytes < 2**8:
        return b"\xc4" + num_bytes.to_bytes(1, "big")
    if num_bytes < 2**16:
        return b"\xc5" + num_bytes.to_bytes(2, "big")
    return b"\xc6" + num_bytes.to_bytes(4, "big")
