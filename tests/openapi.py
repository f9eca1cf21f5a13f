"""What schemathesis finds when it calls an operation in every way that its OpenAPI document allows, and in ways that it does not."""

from collections.abc import Callable, Iterable
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

# JSON Schema says neither what two fields must not be together nor what a checkpoint can sample; and it takes "1.0" for
# an integer, where the path of a part has no such form.
NOT_SAID = [positive_data_acceptance, negative_data_rejection]


def explore(
    operation: Any,
    call: Callable[[schemathesis.Case], object],
    *,
    modes: Iterable[GenerationMode],
    max_examples: int,
) -> None:
    """``call`` each case of the operation; the same cases every time."""
    for mode in modes:

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=max_examples,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def holds(case: schemathesis.Case) -> None:
            call(case)

        holds()
