"""Problems: what went wrong, in words a caller can act on, in a form that crosses processes.

A `Problem` says the wrong thing, its value, the rule and the remedy. Between processes it travels as the JSON
text of a builtin exception, because an exception class of the project cannot be rebuilt by a process that
does not have the project. `Problem.of` finds it again in whatever the transport wrapped around it.

This module knows nothing of HTTP status codes, of Ray, or of any single rule: rules live next to what they
guard.

Invariant: `Problem.of(problem.exception()) == problem`. What a problem holds is made JSON-safe, UTF-8 and short when
the problem is made, not when it is sent.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic_core import PydanticCustomError

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
        field = None if self.field is None else cut(self.field, MAX_FIELD_CHARS)
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
        `schemas.validation`."""
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


def cut(text: str, most: int = MAX_VALUE_CHARS) -> str:
    """The text, UTF-8 and no longer than that, with an ellipsis where it is cut."""
    text = _utf8(text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 1]}{ELLIPSIS}"


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
        return cut(value)
    try:
        text = json.dumps(value, allow_nan=False)
        plain: object = json.loads(text)
        json.dumps(plain, ensure_ascii=False).encode()  # a lone surrogate cannot leave this process as UTF-8
    except (TypeError, ValueError, RecursionError):
        return cut(_text_of(value))
    return plain if len(text) <= MAX_VALUE_CHARS else cut(text)


def _text_of(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an int of more than 4300 digits; a list nested without end
        return f"<{type(value).__name__} too large to print>"


def _utf8(text: str) -> str:
    """The text with lone surrogates written out: they cannot leave this process as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


_PREDICATES = ("must ", "is ", "are ", "cannot ", "needs ", "has ")
"""How a rule begins that reads on from its field's name."""
