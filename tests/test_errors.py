"""Problems survive every way in which they cross a process, and say what to do."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.errors import CODES, MAX_VALUE_CHARS, Problem, invalid
from schemas.request import RolloutRequest
from schemas.validation import problem_of_validation_error

PROBLEM = invalid("num_frames", 120, "must be 8k + 1", "use 113 or 121")


def _refused(**fields: Any) -> Problem:
    with pytest.raises(ValidationError) as caught:
        RolloutRequest.model_validate({"prompt": "a cat", **fields})
    return problem_of_validation_error(caught.value, RolloutRequest)


def test_a_problem_reads_as_a_sentence() -> None:
    assert str(PROBLEM) == "num_frames must be 8k + 1, got 120; use 113 or 121"
    assert (
        str(Problem(code="cancelled", rule="the caller cancelled the group"))
        == "the caller cancelled the group"
    )
    sentence = Problem(
        code="invalid_request", field="image", value="x.png", rule="there are no pictures here"
    )
    assert str(sentence) == 'image: there are no pictures here, got "x.png"'


@pytest.mark.parametrize("code", CODES)
def test_the_exception_is_a_builtin_chosen_by_the_code(code: Any) -> None:
    kinds = {
        "invalid_request": ValueError,
        "weights_refused": ValueError,
        "conflict": ValueError,
        "not_found": LookupError,
        "gone": LookupError,
        "deadline_exceeded": TimeoutError,
    }
    kind = kinds.get(code, RuntimeError)
    error = Problem(code=code, rule="must hold").exception()
    assert type(error) is kind
    assert list(json.loads(str(error))) == ["code", "field", "value", "rule", "remedy"]


@given(
    code=st.sampled_from(CODES),
    field=st.none() | st.text(),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    ),
    rule=st.text(),
    remedy=st.text(),
    around=st.tuples(st.text(), st.text()),
)
def test_any_problem_is_found_again_in_any_text(
    code: Any, field: str | None, value: Any, rule: str, remedy: str, around: tuple[str, str]
) -> None:
    problem = Problem(code=code, field=field, value=value, rule=rule, remedy=remedy)
    before, after = around
    assert Problem.of(problem.exception()) == problem
    assert Problem.of(RuntimeError(f"{before}\nValueError: {problem.exception()}{after}")) == problem


def test_a_problem_is_found_in_causes_and_arguments() -> None:
    class Wrapped(Exception):
        cause: Exception

        def __str__(self) -> str:
            return "wrapped"

    by_attribute, by_chain = Wrapped(), Wrapped()
    by_attribute.cause = PROBLEM.exception()
    by_chain.__cause__ = by_attribute
    assert Problem.of(by_attribute) == PROBLEM
    assert Problem.of(by_chain) == PROBLEM
    assert Problem.of(Wrapped(PROBLEM.exception())) == PROBLEM
    assert Problem.of(Wrapped(str(PROBLEM.exception()))) == PROBLEM


def test_the_last_problem_in_a_traceback_counts() -> None:
    first = Problem(code="internal", rule="must hold").exception()
    assert (
        Problem.of(RuntimeError(f"ValueError: {first}\nduring which\nValueError: {PROBLEM.exception()}"))
        == PROBLEM
    )


def test_a_payload_quoted_in_a_value_is_not_taken_for_the_problem() -> None:
    quoting = invalid("prompt", str(Problem(code="internal", rule="r").exception()), "must be a prompt")
    assert Problem.of(quoting.exception()) == quoting


def test_other_errors_carry_no_problem() -> None:
    endless = ValueError("no problem")
    endless.__cause__ = endless
    others: Sequence[BaseException] = [
        endless,
        KeyError("code"),
        ValueError('{"code": "teapot", "rule": "must be a pot"}'),
        ValueError('{"code": "internal", "rule": 3}'),
        ValueError('{"code": "internal", "ru'),
        KeyboardInterrupt(),
    ]
    assert [Problem.of(error) for error in others] == [None] * len(others)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "nan"),
        (np.int64(3), "np.int64(3)"),
        ((1, 2), [1, 2]),
        ("\ud800", "\\ud800"),
        (["\ud800"], "['\\ud800']"),
        ("x" * 1000, "x" * 199 + "…"),
        (10**5000, "<int too large to print>"),
        ({"a": [1, None, True]}, {"a": [1, None, True]}),
    ],
    ids=["nan", "numpy", "tuple", "surrogate", "inner surrogate", "long", "huge", "json"],
)
def test_a_value_is_kept_as_json_or_as_text(value: Any, shown: Any) -> None:
    problem = invalid("f", value, "must be right")
    assert problem.value == shown
    json.dumps(problem.payload(), allow_nan=False, ensure_ascii=False).encode()
    assert len(json.dumps(problem.value, ensure_ascii=False)) <= MAX_VALUE_CHARS + 2


def test_a_mistyped_field_is_answered_with_the_right_one() -> None:
    problem = _refused(num_frame=9)
    assert (problem.field, problem.value, problem.rule) == ("num_frame", 9, "is not a known field")
    assert "num_frames" in problem.remedy
    nested = _refused(transition={"video": {"noise": 0.7}})
    assert nested.field == "transition.video.noise"
    assert "noise_level" in nested.remedy
    assert _refused(transition={"kind": "cps"}).remedy == "the fields here are video, audio"


def test_a_mistyped_word_is_answered_with_the_nearest() -> None:
    problem = _refused(transition={"video": {"kind": "csp"}})
    assert problem.field == "transition.video.kind"
    assert problem.remedy == "did you mean 'cps'?"


def test_further_wrong_fields_are_counted_and_named() -> None:
    problem = _refused(num_samples=0, seed=-1, foo=3)
    assert problem.field == "num_samples"
    assert problem.remedy == "use 1; 2 more to mend: seed, foo"


def test_a_missing_field_is_named_without_a_value() -> None:
    with pytest.raises(ValidationError) as caught:
        RolloutRequest.model_validate({"num_samples": 2})
    assert problem_of_validation_error(caught.value) == invalid("prompt", None, "is required")


def test_the_http_body_is_no_part_of_a_fields_name() -> None:
    class RequestValidationError:
        """As FastAPI words it."""

        def errors(self) -> list[dict[str, Any]]:
            with pytest.raises(ValidationError) as caught:
                RolloutRequest.model_validate({"prompt": "a cat", "guidance": {"video": 0.5}})
            return [{**detail, "loc": ("body", *detail["loc"])} for detail in caught.value.errors()]

    problem = problem_of_validation_error(RequestValidationError(), RolloutRequest)
    assert problem == invalid("guidance.video", 0.5, "must be at least 1", "use 1")


def test_a_refusal_of_our_own_reads_as_a_sentence_in_pydantics_error() -> None:
    with pytest.raises(ValidationError, match=r"noise_level must be at most 1 for cps, got 1.5; use 1"):
        RolloutRequest.model_validate(
            {"prompt": "a", "transition": {"video": {"kind": "cps", "noise_level": 1.5}}}
        )
    problem = _refused(transition={"video": {"kind": "cps", "noise_level": 1.5}})
    assert problem == invalid("transition.video.noise_level", 1.5, "must be at most 1 for cps", "use 1")
