"""A state dict on its way: tensors as numpy bits, in chunks, with the digests of their bytes.

Knows no Ray and no files, and not what the tensors are for.

Invariants: bits are never changed, and bfloat16 stays bfloat16; nothing is copied that is contiguous and on the
host.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from pipeline.tensors import dtype_of, frozen, name_of
from schemas.errors import Problem
from schemas.weights import TensorSpec
from schemas.weights_check import STILL_SERVED, listed, refused

if TYPE_CHECKING:
    from diffusers import (
        LTX2VideoTransformer3DModel,
    )  # seconds to import, and the weight store needs none of it

CHUNK_BYTES = 256 << 20
"""Large enough that a chunk's overhead is nothing, small enough that several fit anywhere."""
NUM_THREADS = 4
"""Hashing runs at the memory's speed, which a few threads exhaust."""

PIECE_BYTES = 1 << 20
"""What is looked at in one go for infinities: it stays in the cache."""
EXPONENTS = {
    "float64": 0x7FF0_0000_0000_0000,
    "float32": 0x7F80_0000,
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,
}
"""Bits that are all ones in infinities and NaNs alone."""

V = TypeVar("V")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor's bits on the host."""

    array: NDArray[Any]
    """Contiguous, of the tensor's shape; of a dtype that numpy lacks, its bits as unsigned integers."""
    dtype: str
    """torch's name of what the bits are."""

    @property
    def spec(self) -> TensorSpec:
        # Validation would take longer than the copy of a small tensor.
        return TensorSpec.model_construct(dtype=self.dtype, shape=self.array.shape)


def stored(tensor: Tensor) -> StoredTensor:
    """The tensor's bits; where it is contiguous and on the host no copy, but the tensor's own memory."""
    host = tensor.detach().cpu().contiguous()
    bits = host.view(_WITHOUT_NUMPY.get(host.dtype, host.dtype))
    return StoredTensor(array=bits.numpy(), dtype=name_of(host.dtype))


def tensor_of(stored: StoredTensor) -> Tensor:
    """To read from, without a copy; as `frozen`, what would write to it raises."""
    tensor = frozen(stored.array)
    return tensor if tensor.dtype == dtype_of(stored.dtype) else frozen(stored.array, stored.dtype)


def specs_of(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorSpec]:
    """Dtype and shape of each."""
    return {name: tensor.spec for name, tensor in tensors.items()}


def named_tensors(transformer: "LTX2VideoTransformer3DModel") -> dict[str, Tensor]:
    """The transformer's own parameters and buffers under the checkpoint's names, whether or not PEFT wraps
    their layers; an adapter's are left out."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in transformer.state_dict(keep_vars=True).items()
        if ".lora_" not in name
    }


def spec_of(transformer: "LTX2VideoTransformer3DModel") -> dict[str, TensorSpec]:
    """Dtype and shape of each of the transformer's own tensors, by the checkpoint's names."""
    return {
        name: TensorSpec(dtype=name_of(tensor.dtype), shape=tuple(tensor.shape))
        for name, tensor in named_tensors(transformer).items()
    }


def digests_of(tensors: Mapping[str, StoredTensor], num_threads: int = NUM_THREADS) -> dict[str, str]:
    """xxh3_128 of each tensor's bytes, in hex. The GIL is free meanwhile."""
    return _each(_digest, tensors, num_threads)


def non_finite(tensors: Mapping[str, StoredTensor], num_threads: int = NUM_THREADS) -> list[str]:
    """Names of the tensors that hold a NaN or an infinity."""
    return [name for name, found in _each(_has_non_finite, tensors, num_threads).items() if found]


def check_finite(tensors: Mapping[str, StoredTensor], num_threads: int = NUM_THREADS) -> None:
    """Raises ValueError (a Problem) that lists the tensors with a NaN or an infinity."""
    names = non_finite(tensors, num_threads)
    if names:
        rule = f"must be finite, got NaN or infinity in {len(names)} ({listed(names)})"
        raise refused(rule, "go back to a sound state of the trainer").exception()


def chunks_of(
    tensors: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]], max_bytes: int = CHUNK_BYTES
) -> Iterator[dict[str, StoredTensor]]:
    """The tensors' bits in chunks of at most max_bytes, save where one tensor alone is larger.

    tensors: a state dict, or an iterator over parts of one, of which the next is asked for when the one before
    is used up; no two parts share a chunk. Raises ValueError (a Problem) for a name that comes twice, and for
    what has no bits to send.
    """
    parts = [tensors] if isinstance(tensors, Mapping) else tensors
    if not isinstance(parts, Iterable):
        raise _no_state_dict(parts)
    seen: set[str] = set()
    for part in parts:
        if not isinstance(part, Mapping):
            raise _no_state_dict(part)
        chunk: dict[str, StoredTensor] = {}
        num_bytes = 0
        for name, tensor in part.items():
            _check_sendable(name, tensor)
            if name in seen:
                raise refused(f"must name each tensor once, got {name} twice", "send it once").exception()
            seen.add(name)
            if chunk and num_bytes + tensor.nbytes > max_bytes:
                yield chunk
                chunk, num_bytes = {}, 0
            chunk[name] = stored(tensor)
            num_bytes += tensor.nbytes
        if chunk:
            yield chunk


def _no_state_dict(given: object) -> Exception:
    rule = f"must be a state dict or an iterable of parts of one, got {type(given).__name__}"
    return refused(rule, "send names with their tensors").exception()


def _check_sendable(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        rule, remedy = f"must be torch tensors, got {type(tensor).__name__}", "send a state dict"
    elif hasattr(tensor, "full_tensor"):
        rule, remedy = "must be whole, got a shard of a DTensor", "gather it with full_tensor()"
    elif tensor.is_meta or tensor.layout != torch.strided:
        rule, remedy = "must be dense and have values, got none", "send what the model computes with"
    else:
        return
    raise Problem(
        code="weights_refused", field=f"tensors.{name}", rule=rule, remedy=f"{remedy}; {STILL_SERVED}"
    ).exception()


def _each(
    function: Callable[[StoredTensor], V], tensors: Mapping[str, StoredTensor], num_threads: int
) -> dict[str, V]:
    with ThreadPoolExecutor(num_threads) as pool:
        return dict(zip(tensors, pool.map(function, tensors.values()), strict=True))


def _digest(tensor: StoredTensor) -> str:
    digest = xxhash.xxh3_128()
    digest.update(tensor.array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _has_non_finite(tensor: StoredTensor) -> bool:
    exponent = EXPONENTS.get(tensor.dtype)
    if exponent is None:  # integers
        return False
    bits = tensor.array.reshape(-1).view(f"u{tensor.array.itemsize}")
    step = PIECE_BYTES // bits.itemsize
    mask = bits.dtype.type(exponent)
    return any(
        bool(((bits[start : start + step] & mask) == mask).any()) for start in range(0, bits.size, step)
    )


_WITHOUT_NUMPY = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
"""Dtypes that numpy lacks, and what their bits travel as."""
