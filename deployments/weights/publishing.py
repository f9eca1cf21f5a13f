"""A trainer's side of a publication: tensors in, every replica's acknowledgement out.

Names, shapes, dtypes and room are compared before a byte is copied; values and digests are looked at chunk by chunk, the
next while the store takes over the last. Until `commit` the fleet does not know of it.
"""

import time
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from torch import Tensor

from deployments.weights.handle import answer
from pipeline.tensors import dtype_of, name_of
from pipeline.weight_files import lora_config_of, read_file, specs_of_file
from pipeline.weights import check_finite, chunks_of, digests_of, specs_of
from schemas.control import ReplicaState, RunOrder, When
from schemas.errors import Problem
from schemas.lora import LoraSpec
from schemas.validation import validated
from schemas.weights import Publication, PublicationHeader, TensorSpec, Update
from schemas.weights_check import refused

Source = Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]]

PART_DEADLINE_S = 120.0
"""Longest wait until the store has taken a part over."""
GRACE_S = 10.0
"""How much longer than its deadline the store is waited for."""


def publish(
    store: ActorHandle,
    *,
    version: int,
    tensors: Source | None,
    path: str | Path | None,
    update: Update,
    lora_config: Any,
    merge: bool,
    when: When,
    timeout_s: float,
) -> list[ReplicaState]:
    """As `RolloutClient.publish_weights` says."""
    end = time.monotonic() + timeout_s

    def ask(call: Any, *args: Any) -> Any:
        return answer(call.remote(*args), max(0.0, end - time.monotonic()) + GRACE_S)

    validated(RunOrder, {"run": "running", "when": when})
    if (tensors is None) == (path is None):
        raise refused("must be given, or a path, and not both", "give one of the two").exception()
    if path is not None:
        lora_config = lora_config if lora_config is not None or update != "lora" else lora_config_of(path)
    config = None if lora_config is None else validated(LoraSpec, lora_config).model_dump()
    said = {"version": version, "update": update, "merge": merge, "lora_config": config}
    header = validated(PublicationHeader, said)
    specs, num_bytes = _known_beforehand(tensors, path)
    plain = None if specs is None else {name: spec.model_dump() for name, spec in specs.items()}
    ticket, there = ask(store.begin, header.model_dump(mode="json"), plain, num_bytes)
    source = read_file(path) if path is not None else tensors
    assert source is not None
    if there is not None:
        check_same(there, header, source)
        acknowledged = ask(store.acknowledged, version, timeout_s)
    else:
        try:
            _send(store, ticket, source)
            acknowledged = ask(store.commit, ticket, when, max(0.0, end - time.monotonic()))
        except BaseException:
            store.give_up.remote(ticket)
            raise
    return [ReplicaState.model_validate(state) for state in acknowledged]


def check_same(there: str, header: PublicationHeader, source: Source) -> None:
    """A version that is there already may be published again, if it is the same to the byte and in all that is said of
    it: ``there`` is its identity. Raises ValueError (a Problem) for another."""
    specs: dict[str, TensorSpec] = {}
    digests: dict[str, str] = {}
    for chunk in chunks_of(source):
        specs |= specs_of(chunk)
        digests |= digests_of(chunk)
    given = validated(Publication, {**header.model_dump(), "tensors": specs, "digests": digests})
    if given.identity != there:
        raise Problem(
            code="weights_refused",
            field="version",
            value=header.version,
            rule="is published already, with other weights, or as another kind of update",
            remedy=f"use {header.version + 1} or more: versions only grow, and what one is never changes",
        ).exception()


def _send(store: ActorHandle, ticket: str, source: Source) -> None:
    taking: ray.ObjectRef | None = None
    for chunk in chunks_of(source):
        check_finite(chunk)
        digests = digests_of(chunk)
        specs = {name: spec.model_dump() for name, spec in specs_of(chunk).items()}
        if taking is not None:
            answer(taking, PART_DEADLINE_S)
        # As an argument of its own it arrives by reference, and is freed here when the store has copied it.
        arrays = ray.put({name: tensor.array for name, tensor in chunk.items()})
        taking = store.add.remote(ticket, specs, digests, arrays)
        del arrays, chunk
    if taking is not None:
        answer(taking, PART_DEADLINE_S)


def _known_beforehand(
    tensors: Source | None, path: str | Path | None
) -> tuple[dict[str, TensorSpec] | None, int | None]:
    """Specs and bytes of all tensors; None of an iterator's, which come one by one."""
    if path is not None:
        specs = specs_of_file(path)
        return specs, sum(_num_bytes(spec) for spec in specs.values())
    if isinstance(tensors, Mapping) and all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        specs = {
            name: TensorSpec(dtype=name_of(tensor.dtype), shape=tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        return specs, sum(_num_bytes(spec) for spec in specs.values())
    return None, None


def _num_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * dtype_of(spec.dtype).itemsize
