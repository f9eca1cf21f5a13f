"""Tensors and manifests in Arrow tables, without copies.

A column of tensors is a `fixed_shape_tensor`: row r of [R, ...] is one tensor. Arrow has no bfloat16, so it
travels as the uint16 of the same bits; the field's metadata `torch_dtype` says how the bits are meant. A
table's manifest is the JSON under `manifest` in its schema's metadata.

This module knows numpy and Arrow alone, no torch, and no column by name.

Invariants:
* reading copies nothing, and what is read is read-only: Ray's object store is mapped writable, and a write
  would change the object for every reader;
* a reader with pyarrow alone needs nothing from here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Array = NDArray[Any]
"""A read-only view where it comes from a table."""

NUMPY_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "uint8": "uint8",
}
"""Of each torch dtype that travels, the numpy dtype that holds its bits."""

_MANIFEST = b"manifest"
_TORCH_DTYPE = b"torch_dtype"


def tensor_column(name: str, values: Array, torch_dtype: str) -> tuple[pa.Field, pa.Array]:
    """A column of tensors from `values` [R, ...], R >= 1, whose dtype is the one that holds `torch_dtype`'s
    bits.

    Copies nothing where `values` is contiguous; the table then sees later writes to it.
    """
    assert torch_dtype in NUMPY_DTYPES, torch_dtype
    assert values.dtype == NUMPY_DTYPES[torch_dtype], (name, values.dtype, torch_dtype)
    assert values.ndim >= 2 and values.size > 0, (name, values.shape)
    shape = values.shape[1:]
    tensor_type = pa.fixed_shape_tensor(pa.from_numpy_dtype(values.dtype), shape)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    storage = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(shape)))
    column = pa.ExtensionArray.from_storage(tensor_type, storage)
    return pa.field(name, tensor_type, nullable=False, metadata={_TORCH_DTYPE: torch_dtype.encode()}), column


def table_of(columns: Sequence[tuple[pa.Field, pa.Array]], manifest: Mapping[str, Any]) -> pa.Table:
    """A table of one chunk per column. `manifest` must be JSON: a NaN in it is a ValueError."""
    metadata = {_MANIFEST: json.dumps(manifest, allow_nan=False).encode()}
    schema = pa.schema([field for field, _ in columns], metadata=metadata)
    return pa.Table.from_arrays([array for _, array in columns], schema=schema)


def read_tensor(table: pa.Table, name: str) -> Array:
    """The column as one array [R, ...] over the table's own memory, read-only; also of a slice of a table.

    Raises ValueError for a column that is not there, is not made of tensors, or is not in one piece.
    """
    chunk = _only_chunk(table, name)
    if not isinstance(chunk, pa.FixedShapeTensorArray):
        raise ValueError(f"column {name} must hold tensors of one shape, but holds {chunk.type}")
    return _read_only(chunk.to_numpy_ndarray())


def read_numbers(table: pa.Table, name: str) -> Array:
    """The column of plain numbers without nulls as one array [R], in the same way. Raises likewise."""
    return _read_only(_only_chunk(table, name).to_numpy(zero_copy_only=True))


def torch_dtype_of(table: pa.Table, name: str) -> str:
    """The name of the torch dtype that the column's bits are meant as. Raises ValueError where it does not
    say."""
    metadata = table.schema.field(_index(table, name)).metadata or {}
    if _TORCH_DTYPE not in metadata:
        raise ValueError(f"column {name} must name its torch_dtype in its field's metadata, but does not")
    return str(metadata[_TORCH_DTYPE].decode())


def manifest_of(table: pa.Table) -> dict[str, Any]:
    """The table's manifest. Raises ValueError for a table without one."""
    metadata = table.schema.metadata or {}
    if _MANIFEST not in metadata:
        raise ValueError("the table must have a manifest in its schema's metadata, but has none")
    manifest: dict[str, Any] = json.loads(metadata[_MANIFEST])
    return manifest


def _only_chunk(table: pa.Table, name: str) -> pa.Array:
    column = table.column(_index(table, name))
    if column.num_chunks != 1:
        raise ValueError(
            f"column {name} must be in one chunk to be read without a copy, but has {column.num_chunks}; "
            "read the tables one by one, or join them with combine_chunks(), which copies"
        )
    return column.chunk(0)


def _read_only(values: Array) -> Array:
    view = values.view()
    view.flags.writeable = False
    return view


def _index(table: pa.Table, name: str) -> int:
    index: int = table.schema.get_field_index(name)
    if index < 0:
        raise ValueError(f"the table must have a column {name}, but has {', '.join(table.column_names)}")
    return index
