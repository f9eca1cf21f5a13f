"""Problems: what went wrong, in words a caller can act on, in a form that crosses processes.

A `Problem` says the wrong thing, its value, the rule and the remedy. Between processes it travels as the JSON
text of a builtin exception, because an exception class of the project cannot be rebuilt by a process that
does not have the project. `Problem.of` finds it again in whatever the transport wrapped around it.

This module knows nothing of HTTP status codes, of Ray, or of any single rule: rules live next to what they
guard.

Invariants:
* `Problem.of(problem.exception()) == problem`: what a problem holds is made JSON-safe, UTF-8 and short when
  the problem is made, not when it is sent.
* pydantic's errors become Problems in one place, `problem_of_validation_error`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

M = TypeVar("M", bound=BaseModel)

Code = Literal[
    "invalid_request",
    "weights_refused",
    "deadline_exceeded",
    "cancelled",
    "lease_expired",
    "non_finite",
    "out_of_memory",
    "queue_full",
    "replica_died",
    "policy_version_gone",
    "checkpoint_replaced",
    "halted",
    "conflict",
    "not_found",
    "gone",
    "internal",
]
"""Every kind of failure a caller can meet. The first two are the caller's to mend, a request and a publication
of weights; `conflict`, `not_found` and `gone` are about a rollout that is kept under its request_id; the others
are about one run of a sample."""

CODES: tuple[Code, ...] = get_args(Code)

MAX_VALUE_CHARS = 200
"""Characters kept of an offending value: enough to recognise it, too few to flood a log."""
MAX_FIELD_CHARS = 100
"""Characters kept of a field's name, which may be the caller's own."""
MAX_TOLD = 5
"""Errors of one validation that are looked at; the others are counted."""
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One failure, as a value."""

    code: Code
    """What kind of failure."""
    rule: str
    """What should have held, as a predicate of the field ("must be 8k + 1") or as a sentence of its own."""
    field: str | None = None
    """Dotted name of the wrong field as the caller wrote it, "transition.video.noise_level", cut to
    `MAX_FIELD_CHARS` characters; None: no single field."""
    value: object = None
    """What was found there, JSON-safe and cut to `MAX_VALUE_CHARS` characters."""
    remedy: str = ""
    """What to do instead, with the nearest right value where there is one."""

    def __post_init__(self) -> None:
        field = None if self.field is None else _cut(self.field, MAX_FIELD_CHARS)
        texts = {"field": field, "rule": _utf8(self.rule), "remedy": _utf8(self.remedy)}
        for name, part in {**texts, "value": _json_safe(self.value)}.items():
            object.__setattr__(self, name, part)

    def __str__(self) -> str:
        """For people: "num_frames must be 8k + 1, got 120; use 113 or 121"."""
        text = self.rule
        if self.field is not None and not text.startswith(f"{self.field} "):
            text = f"{self.field}{' ' if text.startswith(_PREDICATES) else ': '}{text}"
        if self.value is not None:
            text += f", got {json.dumps(self.value, ensure_ascii=False)}"
        return f"{text}; {self.remedy}" if self.remedy else text

    def payload(self) -> dict[str, object]:
        """The five fields as a JSON object, `code` first (`Problem.of` looks for it there)."""
        return {
            "code": self.code,
            "field": self.field,
            "value": self.value,
            "rule": self.rule,
            "remedy": self.remedy,
        }

    def exception(self) -> Exception:
        """To raise: ValueError for `invalid_request`, `weights_refused` and `conflict`, LookupError for
        `not_found` and `gone`, TimeoutError for `deadline_exceeded`, else RuntimeError.

        Its text is the payload as JSON, in ASCII and on one line.
        """
        kinds: dict[str, type[Exception]] = {
            "invalid_request": ValueError,
            "weights_refused": ValueError,
            "conflict": ValueError,
            "not_found": LookupError,
            "gone": LookupError,
            "deadline_exceeded": TimeoutError,
        }
        return kinds.get(self.code, RuntimeError)(json.dumps(self.payload()))

    def refusal(self) -> PydanticCustomError:
        """To raise inside a pydantic validator: reads as a sentence there, and comes back whole from
        `problem_of_validation_error`."""
        return PydanticCustomError("refused", "{sentence}", {"sentence": str(self), "problem": self})

    @classmethod
    def of(cls, error: BaseException) -> Problem | None:
        """The problem that `error` carries, however it was wrapped; None where it carries none.

        Looks in the error's text (the last payload in it, whatever stands around), then in its `cause`,
        `__cause__` and `args`, and so on down.
        """
        seen: set[int] = set()
        pending: list[object] = [error]
        while pending:
            current = pending.pop(0)
            if id(current) in seen:
                continue
            seen.add(id(current))
            if isinstance(current, str):
                found = _last_problem_in(current)
            elif isinstance(current, BaseException):
                found = _last_problem_in(str(current))
                pending += [getattr(current, "cause", None), current.__cause__, *current.args]
            else:
                found = None
            if found is not None:
                return found
        return None


def invalid(field: str | None, value: object, rule: str, remedy: str = "") -> Problem:
    """The `invalid_request` problem of one field."""
    return Problem(code="invalid_request", field=field, value=value, rule=rule, remedy=remedy)


class HasErrors(Protocol):
    """A pydantic `ValidationError`, or what FastAPI makes of one (`RequestValidationError`)."""

    def errors(self) -> Sequence[Any]:
        """One dict per error: type, loc, msg, input, ctx."""


def problem_of_validation_error(error: HasErrors, model: type[BaseModel] | None = None) -> Problem:
    """The first error of a failed validation as a Problem; its remedy counts the others, and names the next few.

    With `model`, the model that was validated, a mistyped field name is answered with the nearest right one.
    """
    details = error.errors()
    first, *others = [_problem_of_detail(detail, model) for detail in details[:MAX_TOLD]]
    fields = [field for field in dict.fromkeys(str(other.field) for other in others) if field != first.field]
    num_untold = len(details) - 1 - len(others)
    if not fields and not num_untold:
        return first
    untold = [ELLIPSIS] if num_untold else []
    also = f"{len(fields) + num_untold} more to mend: {', '.join([*fields, *untold])}"
    return invalid(first.field, first.value, first.rule, f"{first.remedy}; {also}" if first.remedy else also)


def validated(model: type[M], given: object) -> M:
    """`model.model_validate(given)`, but a refusal is a Problem's ValueError instead of pydantic's."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise problem_of_validation_error(error, model).exception() from None


def _problem_of_detail(detail: Mapping[str, Any], model: type[BaseModel] | None) -> Problem:
    # "body" is where in an HTTP request FastAPI looked; "[...]" is which half of a union pydantic took
    loc = [str(part) for part in detail["loc"] if part != "body" and not str(part).startswith("[")]
    carried = detail.get("ctx", {}).get("problem")
    if isinstance(carried, Problem):
        field = ".".join([*loc, carried.field] if carried.field else loc)
        return invalid(field or None, carried.value, carried.rule, carried.remedy)
    rule, remedy = _rule_and_remedy(detail, _field_names(model, loc[:-1]))
    value = None if detail["type"] == "missing" else detail["input"]
    return invalid(".".join(loc) or None, value, rule, remedy)


def _rule_and_remedy(detail: Mapping[str, Any], siblings: Sequence[str]) -> tuple[str, str]:
    """pydantic's stock errors in the words of this project."""
    ctx = detail.get("ctx", {})
    match detail["type"]:
        case "missing":
            return "is required", ""
        case "extra_forbidden":
            near = _nearest(detail["loc"][-1], siblings, n=2)
            if near:
                return "is not a known field", f"did you mean {' or '.join(near)}?"
            return "is not a known field", f"the fields here are {', '.join(siblings)}" if siblings else ""
        case "greater_than_equal":
            return f"must be at least {ctx['ge']}", f"use {ctx['ge']}"
        case "less_than_equal":
            return f"must be at most {ctx['le']}", f"use {ctx['le']}"
        case "greater_than":
            return f"must be greater than {ctx['gt']}", ""
        case "less_than":
            return f"must be less than {ctx['lt']}", ""
        case "literal_error" | "enum":
            near = _nearest(detail["input"], re.findall(r"'([^']*)'", ctx["expected"]), n=1)
            return f"must be {ctx['expected']}", f"did you mean {near[0]!r}?" if near else ""
        case "model_type" | "model_attributes_type" | "dict_type":
            return "must be a JSON object", f"its fields are {', '.join(siblings)}" if siblings else ""
        case "too_long":
            return f"must have at most {ctx['max_length']} items", ""
        case "tuple_type" | "list_type":
            return "must be a list", ""
        case "int_type":
            given = detail["input"]
            whole = isinstance(given, float) and given.is_integer()
            return "must be an integer", f"use {given:.0f}" if whole else ""
        case "float_type":
            return "must be a number", ""
        case _:
            message = str(detail["msg"])
            return re.sub(r"^(Input|Value|String|Tuple|List) should ", "must ", message), ""


def _nearest(given: object, words: Sequence[str], n: int) -> list[str]:
    return difflib.get_close_matches(_cut(str(given), MAX_FIELD_CHARS), words, n=n)


def _field_names(model: type[BaseModel] | None, loc: Sequence[str]) -> list[str]:
    """Names of the fields of the model found at `loc` below `model`; none where there is no model there."""
    for part in loc:
        field = model.model_fields.get(part) if model else None
        model = next(_models_in(field.annotation), None) if field else None
    return list(model.model_fields) if model else []


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _last_problem_in(text: str) -> Problem | None:
    """The last payload that stands in `text`. Quotes inside a payload are escaped, so one never hides in
    another."""
    for start in reversed([match.start() for match in re.finditer(r'\{"code": ?"', text)]):
        try:
            found, _ = json.JSONDecoder().raw_decode(text, start)
        except ValueError:  # something else's text, or a payload that was cut short
            continue
        if found.get("code") in CODES and isinstance(found.get("rule"), str):
            known = {
                name: found[name] for name in ("code", "field", "value", "rule", "remedy") if name in found
            }
            return Problem(**known)
    return None


def _json_safe(value: object) -> object:
    """`value` where its JSON is short and exact, else its text, cut."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _cut(value)
    try:
        text = json.dumps(value, allow_nan=False)
        plain: object = json.loads(text)
        json.dumps(plain, ensure_ascii=False).encode()  # a lone surrogate cannot leave this process as UTF-8
    except (TypeError, ValueError, RecursionError):
        return _cut(_text_of(value))
    return plain if len(text) <= MAX_VALUE_CHARS else _cut(text)


def _text_of(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an int of more than 4300 digits; a list nested without end
        return f"<{type(value).__name__} too large to print>"


def _cut(text: str, most: int = MAX_VALUE_CHARS) -> str:
    text = _utf8(text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 1]}{ELLIPSIS}"


def _utf8(text: str) -> str:
    """The text with lone surrogates written out: they cannot leave this process as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


_PREDICATES = ("must ", "is ", "are ", "cannot ", "needs ", "has ")
"""How a rule begins that reads on from its field's name."""
