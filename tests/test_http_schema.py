"""The OpenAPI document against the app: every field is in it, and whatever is sent, no answer is undocumented and none is a fault of ours."""

from itertools import cycle

import pytest
import schemathesis
from schemathesis.generation import GenerationMode

from deployments.kept.api import Settled, Submitted
from schemas.problem_details import ProblemDetails
from schemas.request import RolloutRequest
from tests.fake_archive import FakeArchive
from tests.http_apps import BALL, app_of
from tests.openapi import NOT_SAID, explore

ACCEPTED = [
    "*/*",
    "application/json",
    "text/event-stream",
    "video/mp4",
    "application/vnd.apache.arrow.stream",
]


class Generous(FakeArchive):
    """One rollout under most ids; some were kept once, some never."""

    async def find(self, id: str) -> Submitted:
        return await super().find(await self._meant(id))

    async def wait(self, id: str, group_id: str | None = None) -> Settled:
        return await super().wait(await self._meant(id), group_id)

    async def _meant(self, id: str) -> str:
        if self.shelf.get("ball") is None:
            for request_id in ("ball", "old"):
                await self.submit({**BALL, "request_id": request_id})
            self.shelf.forget(self.shelf.find("old"))
        if self.shelf.get(id) is not None:
            return id
        return ("never", "old", "ball", "ball", "ball")[len(id) % 5]


APP = app_of(Generous(keep_s=1e9, keep_bytes=2**40))
DOCUMENT = schemathesis.openapi.from_asgi("/openapi.json", APP)
OPERATIONS = {result.ok().label: result.ok() for result in DOCUMENT.get_all_operations()}


@pytest.mark.parametrize("label", OPERATIONS)
def test_no_answer_is_undocumented_and_none_is_a_fault_of_ours(label: str) -> None:
    accepted = cycle(ACCEPTED)
    # A path of text alone cannot be wrong.
    modes = GenerationMode if "POST" in label or "sample" in label else [GenerationMode.POSITIVE]

    def call(case: schemathesis.Case) -> None:
        for accept in ("text/html", next(accepted)):
            case.call_and_validate(headers={"Accept": accept}, excluded_checks=NOT_SAID)

    explore(OPERATIONS[label], call, modes=modes, max_examples=30)


def test_every_field_of_a_request_is_in_the_document() -> None:
    document = app_of(FakeArchive()).openapi()
    schemas = document["components"]["schemas"]
    assert schemas["RolloutRequest"]["properties"].keys() == RolloutRequest.model_fields.keys()
    assert schemas["ProblemDetails"]["properties"].keys() == ProblemDetails.model_fields.keys()
    assert "HTTPValidationError" not in schemas
