"""The lease board alone, on a clock of the test's."""

import asyncio
from collections.abc import Callable
from typing import Any

from deployments.lease_board import LeaseBoard


class Board:
    """A board and its clock, called without a loop."""

    def __init__(self, lease_s: float) -> None:
        self.now = 100.0
        self._board = LeaseBoard(lease_s, clock=lambda: self.now)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: asyncio.run(getattr(self._board, method)(*args))


def test_a_lease_ends_one_term_after_it_was_last_renewed() -> None:
    board = Board(10)
    board.renew("mine")
    board.now += 4
    assert board.pulse("replica", {"mine": {}}) == {"mine": 6}
    board.renew("mine")
    assert board.pulse("replica", {"mine": {}}) == {"mine": 10}
    board.now += 11
    assert board.pulse("replica", {"mine": {}}) == {"mine": -1}


def test_a_released_lease_ends_at_once() -> None:
    board = Board(10)
    board.renew("mine")
    board.release("mine")
    assert board.pulse("replica", {"mine": {}}) == {"mine": 0}


def test_a_new_board_gives_leases_that_it_has_not_heard_of_one_term() -> None:
    board = Board(10)
    assert board.pulse("replica", {"unknown": {}}) == {"unknown": 10}
    board.now += 9
    assert board.pulse("replica", {"unknown": {}}) == {"unknown": 1}
    board.renew("unknown")
    assert board.leases() == {"unknown": 10}


def test_a_renewal_tells_the_progress_of_its_own_samples_on_all_replicas() -> None:
    board = Board(10)
    board.pulse("first", {"mine": {"a": (1, 6)}, "other": {"c": (2, 6)}})
    board.pulse("second", {"mine": {"b": (3, 6)}})
    assert board.renew("mine") == {"a": (1, 6), "b": (3, 6)}
    board.pulse("first", {"mine": {"a": (2, 6)}})
    board.pulse("second", {})
    assert board.renew("mine") == {"a": (2, 6)}


def test_what_is_over_is_forgotten_a_term_later() -> None:
    board = Board(10)
    board.renew("old")
    board.pulse("dead", {"mine": {"a": (1, 6)}})
    board.now += 15
    assert board.renew("mine") == {}
    assert board.leases().keys() == {"old", "mine"}
    board.now += 6
    board.renew("mine")
    assert board.leases().keys() == {"mine"}
