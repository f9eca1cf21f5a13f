"""What is too much in a request is refused soon, and in few words."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from schemas.errors import Problem
from schemas.fields import MAX_ITEMS
from schemas.request import RolloutRequest
from schemas.resolve import resolve
from schemas.sglang import SGLangRequest
from schemas.sglang_weights import ChecksumRequest, UpdateFromDisk
from schemas.validation import validated
from tests.cards import ltx23_card

SOON_S = 2.0
"""Each takes well under a tenth of it on an idle core; what grows by the square takes minutes."""


@contextmanager
def soon() -> Iterator[None]:
    started = time.process_time()
    yield
    assert time.process_time() - started < SOON_S


def refused(model: Any, given: Mapping[str, Any]) -> Problem:
    with soon(), pytest.raises(ValueError, match="invalid_request") as caught:
        model.of({"prompt": "a", **given})
    problem = Problem.of(caught.value)
    assert problem is not None
    return problem


LISTS = [
    (RolloutRequest, "stochastic_steps"),
    (RolloutRequest, "return_steps"),
    (SGLangRequest, "rollout_sde_step_indices"),
    (SGLangRequest, "rollout_return_step_indices"),
]


@pytest.mark.parametrize(("model", "field"), LISTS)
def test_a_list_of_steps_is_looked_through_once(model: Any, field: str) -> None:
    steps = list(range(MAX_ITEMS - 1))
    further = {"rollout_return_dit_trajectory": True} if model is SGLangRequest else {}
    with soon():
        assert len(getattr(model.of({"prompt": "a", field: steps, **further}), field)) == len(steps)
    assert refused(model, {field: [*steps, 17]}).field == f"{field}.{len(steps)}"


@pytest.mark.parametrize(("model", "field"), [*LISTS, (RolloutRequest, "sigmas")])
@pytest.mark.parametrize("item", [1, ""])
def test_a_longer_list_is_refused_whatever_is_in_it(model: Any, field: str, item: Any) -> None:
    problem = refused(model, {field: [item] * 300_000})
    assert (problem.field, problem.rule) == (field, f"must have at most {MAX_ITEMS} items")
    assert len(str(problem)) < 1000


@pytest.mark.parametrize("num_steps", [101, 2**31 - 1])
def test_steps_are_counted_before_they_are_listed(num_steps: int) -> None:
    with soon(), pytest.raises(ValueError, match="must be at most 100 steps"):
        resolve({"prompt": "a", "num_inference_steps": num_steps, "return_steps": "all"}, ltx23_card())


def test_an_endless_list_is_counted_and_not_made() -> None:
    assert refused(RolloutRequest, {"stochastic_steps": range(10**9)}).field == "stochastic_steps"


@pytest.mark.parametrize(
    "given",
    [
        {f"stochastic_step{number}": 0 for number in range(50_000)},
        {"x" * 1_000_000: 0},
        {"mode": "x" * 1_000_000},
        {"transition": {"video": {f"{number}": 0 for number in range(50_000)}}},
        {"metadata": {"x" * 1_000_000: 0}},
        {"sigmas": ["x" * 10] * 9_000},
    ],
    ids=["keys", "key", "word", "inner keys", "metadata", "items"],
)
def test_what_is_wrong_is_told_in_few_words(given: dict[str, Any]) -> None:
    assert len(str(refused(RolloutRequest, given))) < 1500


@pytest.mark.parametrize("model", [RolloutRequest, SGLangRequest])
def test_others_are_counted_and_the_first_are_named(model: Any) -> None:
    problem = refused(model, {f"wrong{number}": 0 for number in range(9)})
    assert problem.field == "wrong0"
    assert problem.remedy.endswith("8 more to mend: wrong1, wrong2, wrong3, wrong4, …")


@pytest.mark.parametrize("model", [UpdateFromDisk, ChecksumRequest])
@pytest.mark.parametrize("names", [["a"] * 101, [0] * 100_000, ["a" * 101], ["\ud800"]])
def test_names_of_modules_are_few_short_and_text(model: Any, names: list[Any]) -> None:
    field = "target_modules" if model is UpdateFromDisk else "module_names"
    with soon(), pytest.raises(ValueError, match=field) as caught:
        validated(model, {"model_path": "x", field: names} if model is UpdateFromDisk else {field: names})
    problem = Problem.of(caught.value)
    assert problem is not None and len(str(problem)) < 1000
