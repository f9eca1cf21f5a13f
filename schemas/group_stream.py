"""The trajectories of a group as one Arrow IPC stream, and back.

A stream has one schema, and the samples of a group differ only in their manifests. So each sample is one record batch,
with its rows as in its own table and a first column `sample_index`; and the stream's schema metadata holds, under
`rollout`, the JSON of what is known beside the columns:

    {"request_id": ..., "request": {...},
     "samples": [{"sample_index": 0, "manifest": {...}, "problem": null}, ...]}

A sample that failed has a problem, no manifest and no batch. Metadata of a schema survives in every reader of Arrow,
which that of single batches does not. This module knows no HTTP; it copies no latents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from schemas.arrow import manifest_of

ROLLOUT = b"rollout"
MANIFEST = b"manifest"
SAMPLE_INDEX = "sample_index"


def group_schema(
    tables: Mapping[int, pa.Table],
    request: Mapping[str, Any],
    problems: Mapping[int, Mapping[str, Any]],
) -> pa.Schema:
    """The schema of the stream of ``tables``, by sample index; at least one sample has a table."""
    samples = [
        {
            "sample_index": index,
            "manifest": manifest_of(tables[index]) if index in tables else None,
            "problem": problems.get(index),
        }
        for index in sorted({*tables, *problems})
    ]
    known = {"request_id": request["request_id"], "request": request, "samples": samples}
    fields = next(iter(tables.values())).schema
    index_field = pa.field(SAMPLE_INDEX, pa.int32(), nullable=False)
    return pa.schema([index_field, *fields], metadata={ROLLOUT: json.dumps(known).encode()})


def group_batches(tables: Mapping[int, pa.Table], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """One record batch per sample, by sample index, over the tables' own memory."""
    for index, table in sorted(tables.items()):
        column = pa.array([index] * table.num_rows, pa.int32())
        yield pa.RecordBatch.from_arrays([column, *_chunks(table)], schema=schema)


def read_group(source: Any) -> tuple[dict[int, pa.Table], dict[str, Any]]:
    """The trajectory table of every sample that was done, by sample index, as its own link or a handle gives it; and
    the rest: request_id, request, and each sample's manifest or problem.

    ``source``: bytes, or a file to read from. Raises ValueError for a stream of something else.
    """
    with pa.ipc.open_stream(source) as reader:
        metadata = reader.schema.metadata or {}
        if ROLLOUT not in metadata:
            raise ValueError("the stream must have a rollout in its schema's metadata, but has none")
        rollout: dict[str, Any] = json.loads(metadata[ROLLOUT])
        tables = {}
        for batch in reader:
            table = pa.Table.from_batches([batch])
            index = table.column(SAMPLE_INDEX)[0].as_py()
            manifest = json.dumps(rollout["samples"][index]["manifest"]).encode()
            tables[index] = table.drop_columns([SAMPLE_INDEX]).replace_schema_metadata({MANIFEST: manifest})
    return tables, rollout


def _chunks(table: pa.Table) -> Sequence[pa.Array]:
    return [column.chunk(0) for column in table.columns]
