"""What the archive remembers: for how long, how much of it, and what it says of the rest."""

from dataclasses import dataclass

import pytest

from deployments.kept import shelf as shelf_module
from deployments.kept.shelf import Shelf
from schemas.errors import Problem


@dataclass(eq=False)
class Rollout:
    id: str


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(shelf: Shelf[Rollout], id: str, num_bytes: int = 10) -> Rollout:
    rollout = Rollout(id)
    shelf.put(rollout)
    shelf.settle(rollout, num_bytes)
    return rollout


def code_of(shelf: Shelf[Rollout], id: str) -> str:
    with pytest.raises(LookupError) as error:
        shelf.find(id)
    problem = Problem.of(error.value)
    assert problem is not None and problem.value == id
    return problem.code


def test_a_running_rollout_stays_and_a_settled_one_has_a_term() -> None:
    clock = Clock()
    shelf = Shelf[Rollout](10, 100, clock)
    running = Rollout("running")
    shelf.put(running)
    settled = kept(shelf, "settled")
    clock.now = 9.9
    assert shelf.find("running") is running and shelf.find("settled") is settled
    clock.now = 10
    assert shelf.find("running") is running and shelf.kept_bytes == 0
    assert code_of(shelf, "settled") == "gone" and code_of(shelf, "never") == "not_found"


def test_the_oldest_make_way_for_what_is_new() -> None:
    shelf = Shelf[Rollout](10, 100, Clock())
    for id in "abc":
        kept(shelf, id, 40)
    assert code_of(shelf, "a") == "gone" and shelf.kept_bytes == 80 and shelf.num_kept == 2
    kept(shelf, "huge", 101)
    assert shelf.kept_bytes == 0 and code_of(shelf, "huge") == "gone"


def test_rollouts_of_no_bytes_and_ids_of_gone_ones_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "MAX_KEPT", 3)
    monkeypatch.setattr(shelf_module, "MAX_GONE", 2)
    shelf = Shelf[Rollout](10, 100, Clock())
    for id in "abcdefg":
        kept(shelf, id, 0)
    assert shelf.num_kept == 3
    assert [code_of(shelf, id) for id in "abcd"] == ["not_found", "not_found", "gone", "gone"]


def test_a_rollout_that_was_forgotten_while_it_ran_is_not_kept_when_it_settles() -> None:
    shelf = Shelf[Rollout](10, 100, Clock())
    first = Rollout("a")
    shelf.put(first)
    shelf.forget(first)
    assert code_of(shelf, "a") == "gone"
    second = Rollout("a")
    shelf.put(second)
    shelf.settle(first, 10)
    shelf.forget(first)
    assert shelf.find("a") is second and shelf.kept_bytes == 0 and shelf.running == [second]


def test_one_under_an_id_that_is_kept_takes_its_place() -> None:
    shelf = Shelf[Rollout](10, 100, Clock())
    kept(shelf, "a", 60)
    second = kept(shelf, "a", 30)
    assert shelf.find("a") is second and shelf.kept_bytes == 30
