"""pydantic's refusals as Problems, in the words of this project: the one place where they become that."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from schemas.errors import ELLIPSIS, MAX_FIELD_CHARS, Problem, cut, invalid

M = TypeVar("M", bound=BaseModel)

MAX_TOLD = 5
"""Errors of one validation that are looked at; the others are counted."""


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
    return difflib.get_close_matches(cut(str(given), MAX_FIELD_CHARS), words, n=n)


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
