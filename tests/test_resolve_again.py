"""A resolved request stays what it is, unless somebody tampered with it or another card forbids it."""

import json

import pytest

from schemas.errors import Problem
from schemas.resolve import check, resolve
from tests.cards import ltx23_card
from tests.resolving import CARD, ODE, resolved_of


def test_a_resolved_request_resolves_to_itself() -> None:
    for fields in (
        {},
        {"mode": "generate"},
        {"sigmas": [1.0, 0.4], "guidance": {"video": 2}, "metadata": {"a": 0.1}},
    ):
        resolved = resolved_of(**fields)
        assert resolve(resolved, CARD) == resolved
        assert resolve(resolved.model_dump(), CARD) == resolved
        assert resolve(json.loads(resolved.model_dump_json()), CARD) == resolved


def test_a_resolved_request_that_was_tampered_with_is_refused() -> None:
    good = resolved_of(transition={"video": ODE}).model_dump()
    for change, field in (
        ({"stochastic_steps": {"video": [1], "audio": []}}, "stochastic_steps"),
        ({"stochastic_steps": {"video": [], "audio": [2, 1]}}, "stochastic_steps"),
        ({"return_steps": [0]}, "return_steps"),
        ({"negative_prompt": "blurry"}, "negative_prompt"),
        ({"mode": "generate"}, "guider"),
        ({"num_samples": 65}, "num_samples"),
    ):
        with pytest.raises(ValueError, match="invalid_request") as caught:
            resolve({**good, **change}, CARD)
        problem = Problem.of(caught.value)
        assert problem is not None
        assert problem.field == field


def test_another_card_may_refuse_what_was_resolved() -> None:
    resolved = resolved_of(num_samples=8)
    check(resolved, CARD)
    with pytest.raises(ValueError, match="num_samples"):
        check(resolved, ltx23_card(limits={"max_num_samples": 4}))
