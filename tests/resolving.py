"""Requests resolved against a card with LTX-2.3's numbers, or refused by it."""

from typing import Any

import pytest

from schemas.errors import Problem
from schemas.resolve import ResolvedRequest, resolve
from tests.cards import ltx23_card

CARD = ltx23_card()
ODE = {"kind": "ode"}
CPS = {"kind": "cps"}


def resolved_of(**fields: Any) -> ResolvedRequest:
    return resolve({"prompt": "a cat", **fields}, CARD)


def problem_of(**fields: Any) -> Problem:
    card = fields.pop("card", CARD)
    with pytest.raises(ValueError, match="invalid_request") as caught:
        resolve({"prompt": "a cat", **fields}, card)
    problem = Problem.of(caught.value)
    assert problem is not None
    return problem
