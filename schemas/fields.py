"""The kinds of field that the contract's models are made of.

Numbers are strict: `True`, "4" and 4.5 are not integers, and NaN is not a number. numpy's scalars and arrays
are taken for the Python numbers they hold, since step indices and seeds often come from a numpy generator.

This module knows no field by name.
"""

import numbers
import operator
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from schemas.errors import invalid

MAX_COUNT = 2**31 - 1
"""No size here comes near it; past it a typing error is meant, and float arithmetic on sizes would lose
units."""
MAX_ITEMS = 10_000
"""Of any list: no list of steps here comes near it, and what is longer is refused before its items are looked at."""


class Contract(BaseModel):
    """Base of every model: immutable, an unknown key is an error, docstrings under fields describe them."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


def _python_int(value: object) -> object:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return operator.index(value) if is_integer else value  # type: ignore[arg-type]  # Integral has __index__


def _python_float(value: object) -> object:
    is_float = isinstance(value, numbers.Real) and not isinstance(value, bool | int)
    return float(value) if is_float else value  # type: ignore[arg-type]  # Real has __float__


def _python_tuple(value: Any) -> object:
    # Said here, since pydantic looks at all items of a tuple before it counts them.
    if hasattr(value, "__len__") and not isinstance(value, str) and len(value) > MAX_ITEMS:
        rule = f"must have at most {MAX_ITEMS} items"
        raise invalid(None, f"{len(value)} items", rule, "name fewer, each once").refusal()
    if hasattr(value, "tolist"):  # a numpy array
        value = value.tolist()
    return tuple(value) if isinstance(value, list | range) else value


Bool = Annotated[bool, Field(strict=True)]
Int = Annotated[int, BeforeValidator(_python_int), Field(strict=True)]
Index = Annotated[Int, Field(ge=0)]
Count = Annotated[Int, Field(ge=1, le=MAX_COUNT)]
Bytes = Annotated[Int, Field(ge=0)]
Indices = Annotated[
    tuple[Index, ...], Field(max_length=MAX_ITEMS), BeforeValidator(_python_tuple), Field(strict=True)
]
Float = Annotated[float, BeforeValidator(_python_float), Field(strict=True)]
Positive = Annotated[Float, Field(gt=0)]
Floats = Annotated[
    tuple[Float, ...], Field(max_length=MAX_ITEMS), BeforeValidator(_python_tuple), Field(strict=True)
]
