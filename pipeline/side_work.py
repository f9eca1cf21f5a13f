"""Work that a step need not wait for: noise drawn ahead, kept states copied to the host while the next step runs.

Beside the step thread: this changes when something is computed, never what.
"""

from concurrent.futures import Executor, Future
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.noise import draw


class Draws:
    """The keyed draws of one sample, made ahead on a side thread where one is given."""

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor
        self._ahead: dict[int, Future[Tensor]] = {}

    def prepare(self, key: int, shape: tuple[int, ...]) -> None:
        """Start a draw that will be taken soon."""
        if self._executor is not None and key not in self._ahead:
            self._ahead[key] = self._executor.submit(draw, key, shape)

    def take(self, key: int, shape: tuple[int, ...]) -> Tensor:
        """The draw, float32 on the CPU; each is handed out once."""
        ahead = self._ahead.pop(key, None)
        return draw(key, shape) if ahead is None else ahead.result()


@dataclass(frozen=True, kw_only=True, slots=True)
class OnHost:
    """A tensor on its way to the host."""

    buffer: Tensor
    ready: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """The host's copy, complete."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.buffer


class HostCopies:
    """Copies tensors into host memory that was set aside for them: on CUDA it is pinned, and the copies run on a
    stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory to copy into."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def start(self, tensor: Tensor, into: Tensor) -> OnHost:
        """Begin to copy a tensor that is not written to any more."""
        if self._stream is None:
            return OnHost(buffer=into.copy_(tensor))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            into.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
            ready.record(self._stream)
        return OnHost(buffer=into, ready=ready)


class Pace:
    """Keeps the step thread at most one step ahead of the device, so that a cancel, a deadline and the heartbeat mean
    what the device does and not what is queued for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._last: torch.cuda.Event | None = None

    def step(self) -> None:
        """Called after a step was queued: wait until the one before it is done."""
        if not self._on_cuda:
            return
        queued = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
        queued.record()
        if self._last is not None:
            self._last.synchronize()
        self._last = queued


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a host tensor without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
