"""Between read-only arrays and torch: two ways to read a stored array, chosen by name.

Ray maps its object store writable, so a plain ``torch.from_numpy(view).mul_(2)`` would silently change the object for
every other reader. ``frozen`` shares the memory and refuses in-place ops; ``owned`` copies, and is what replay and
training use.
"""

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# `frozen` answers what torch warns of. Once for the process, since a filter per call takes longer than the call and is not
# safe among threads.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def frozen(array: NDArray[np.generic], torch_dtype: str | None = None) -> Tensor:
    """A zero-copy tensor over ``array`` to read from: an op that would write to it or to a view of it raises
    RuntimeError before it does, in every gradient mode.

    ``torch_dtype="bfloat16"`` reinterprets uint16 bits. What asks for writable memory raises too, whether it would write
    or not: ``numpy()``, ``data_ptr()``, pickling, ``torch.compile``, a few kernels on the CPU. ``clone()`` it there.
    """
    tensor = torch.from_numpy(array)
    # An inference tensor would be no protection: torch refuses an in-place op on one only after it has written.
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor.view(dtype_of(torch_dtype)) if torch_dtype else tensor


def owned(
    array: NDArray[np.generic], device: str | torch.device = "cpu", torch_dtype: str | None = None
) -> Tensor:
    """A copy of ``array`` on ``device`` that shares nothing with it and may be written and differentiated."""
    tensor = torch.from_numpy(np.array(array, copy=True))
    return (tensor.view(dtype_of(torch_dtype)) if torch_dtype else tensor).to(device)


def write(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy each value into the tensor of its name, of the same shape. As one operation: the GIL is given up once, while a
    loop of copies would queue for it behind this process's other threads after every tensor."""
    if values:
        torch._foreach_copy_([tensors[name] for name in values], list(values.values()))


def to_numpy(tensor: Tensor) -> NDArray[np.generic]:
    """The tensor's bits on the host, contiguous; bfloat16 as uint16, since numpy has no such type."""
    host = tensor.detach().cpu().contiguous()
    return (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called ``name``, such as ``"bfloat16"``. Raises ValueError for a name that is not a dtype's."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must name a torch dtype such as float32 or bfloat16, got {name!r}")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name without the ``torch.`` prefix."""
    return str(dtype).removeprefix("torch.")
