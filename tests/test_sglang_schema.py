"""The OpenAPI document against SGLang's routes: what may be asked is in it, and no answer is undocumented."""

from pathlib import Path

import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

from tests.openapi import NOT_SAID, explore
from tests.sglang_apps import GENERATE, FakeArchive, FakeWeights, app_of

DOCUMENT = schemathesis.openapi.from_asgi(
    "/openapi.json", app_of(FakeArchive(), FakeWeights(), Path("/nowhere"))
)
OPERATIONS = {
    label: found.ok()
    for found in DOCUMENT.get_all_operations()
    if not (label := found.ok().label).partition(" ")[2].startswith(("/v1", "/health"))
}


def test_the_document_says_what_may_be_asked_and_answered() -> None:
    document = app_of(FakeArchive(), FakeWeights()).openapi()
    generate = document["paths"][GENERATE]["post"]
    fields = generate["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"prompt", "rollout_sde_type", "rollout_audio_sde_type"} <= set(fields)
    assert set(generate["responses"]) >= {"200", "401", "410", "413", "422", "503", "504"}
    assert "application/msgpack" in generate["responses"]["200"]["content"]


@pytest.mark.parametrize("label", OPERATIONS)
def test_no_answer_is_undocumented(label: str) -> None:
    """Nor a fault of ours, but for 501, which is documented as what those routes are."""
    excluded = [*NOT_SAID, not_a_server_error] if "tensor" in label else NOT_SAID
    # Without a body nothing can be wrong.
    modes = GenerationMode if OPERATIONS[label].body else [GenerationMode.POSITIVE]
    explore(
        OPERATIONS[label],
        lambda case: case.call_and_validate(excluded_checks=excluded),
        modes=modes,
        max_examples=20,
    )
