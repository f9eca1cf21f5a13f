"""Moving a module's tensors between host and device while everything that refers to them stays.

Parameters and buffers keep their identity, and only what they point to is exchanged. (Addresses change, so that
a captured CUDA graph is void after a round trip.)

Invariants: bits do not change; where memory does not suffice, nothing has moved.
"""

import torch
from torch import Tensor, nn


def move(module: nn.Module, device: torch.device) -> None:
    """Move every parameter and buffer to `device`; on the host they are in pinned memory."""
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.device != device]
    if not tensors:
        return
    pinned = device.type == "cpu"
    copies: list[Tensor] = [torch.empty_like(t, device=device, pin_memory=pinned) for t in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        copy.copy_(tensor.detach(), non_blocking=True)
    torch.cuda.synchronize()
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.data = copy
    torch.cuda.empty_cache()
