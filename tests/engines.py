"""Engines driven by hand or by their own loop, and what stands in for the transformer at their seam."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeline.engine import Engine
from pipeline.entry import Finished
from pipeline.sample import Job
from schemas.errors import Problem
from tests.patience import PATIENCE_S

Order = Callable[..., Job]

NUM_STEPS = 6
"""Of a tiny rollout."""
LARGER = {"height": 96, "width": 96, "num_frames": 17}
"""Another geometry than the default."""
MAX_TICKS = 1000
"""More than any test needs: an engine that never comes to rest fails here instead of hanging."""


def sample(engine: Engine, jobs: Sequence[Job]) -> list[Finished]:
    """The jobs' results, in their order, all submitted at once."""
    futures = [engine.submit(job) for job in jobs]
    settle(engine)
    return [future.result(timeout=0) for future in futures]


def settle(engine: Engine) -> int:
    """Tick until nothing is left to do; how many ticks moved samples."""
    for num_ticks in range(MAX_TICKS):
        if not engine.tick():
            return num_ticks
    raise AssertionError(f"the engine still had work after {MAX_TICKS} ticks")


@contextmanager
def running(engine: Engine) -> Iterator[threading.Thread]:
    """The engine's loop on a thread of its own, which ends with the block, whatever becomes of that."""
    loop = threading.Thread(target=engine.run, daemon=True)
    loop.start()
    try:
        yield loop
    finally:
        engine.stop()
        loop.join(PATIENCE_S)
    assert not loop.is_alive(), "the loop did not end"


def problem_of(future: Future[Finished], timeout_s: float = 0) -> Problem:
    """Why a sample failed, as another process would read it."""
    error = future.exception(timeout_s)
    assert error is not None and type(error) in (ValueError, TimeoutError, RuntimeError)
    problem = Problem.of(error)
    assert problem is not None
    return problem


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class StillTransformer:
    """Every velocity is 0: a sample's states are then its noise, and nothing is computed."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.rope = self.audio_rope = self
        self.batches: list[dict[str, Any]] = []
        """The inputs of every forward pass."""

    def prepare_video_coords(self, *_: Any, **__: Any) -> None:
        return None

    prepare_audio_coords = prepare_video_coords

    def __call__(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        self.batches.append(inputs)
        return torch.zeros_like(inputs["hidden_states"]), torch.zeros_like(inputs["audio_hidden_states"])


class RowByRow:
    """A transformer that computes one row at a time, so that a row's bits depend on nothing but the row.

    ``before`` sees a pass's inputs first, and may raise.
    """

    def __init__(
        self, transformer: Any, before: Callable[[dict[str, Any]], None] = lambda inputs: None
    ) -> None:
        self.transformer, self.before = transformer, before
        self.dtype, self.device = transformer.dtype, transformer.device
        self.rope, self.audio_rope = transformer.rope, transformer.audio_rope

    def __call__(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        self.before(inputs)
        num_rows = len(inputs["hidden_states"])
        rows = [
            self.transformer(**{k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in inputs.items()})
            for i in range(num_rows)
        ]
        video, audio = zip(*rows, strict=True)
        return torch.cat(video), torch.cat(audio)
