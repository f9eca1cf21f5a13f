"""An event loop whose time is its own: it leaps to the next thing that is due as soon as nobody has anything to do.

What takes an hour by its clock takes no time at all, and no machine is too slow for a deadline.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(script: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`. For scripts that wait for time and for each other, and for nothing outside of their loop."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(script)


class _Selector(selectors.DefaultSelector):
    """Instead of waiting until something is due, it says that it has waited."""

    waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and nothing is due"
        self.waited_s += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.waited_s
