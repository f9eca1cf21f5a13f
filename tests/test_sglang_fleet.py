"""The fleet by SGLang's routes: its checksum, and its sleep."""

import pytest

from schemas.control import Control, Fleet
from schemas.errors import Problem
from tests.sglang_apps import DIGEST, FakeWeights, post


def test_checksums_are_the_fleets_digests() -> None:
    assert post("/get_weights_checksum", {}).json() == {"transformer": DIGEST}
    assert post("/get_weights_checksum", b"").json() == {"transformer": DIGEST}
    answer = post("/get_weights_checksum", {"module_names": ["vae", "transformer"]})
    assert answer.json() == {"vae": "not_found", "transformer": DIGEST}


@pytest.mark.parametrize("digests", [[DIGEST, "cd" * 16], []])
def test_replicas_that_do_not_agree_have_no_checksum(digests: list[str]) -> None:
    weights = FakeWeights()
    weights.digests = digests
    answer = post("/get_weights_checksum", {"module_names": None}, weights=weights)
    assert answer.status_code == 503 and answer.json()["success"] is False


def test_a_replica_that_is_heard_of_late_is_waited_for() -> None:
    class Late(FakeWeights):
        calls = 0

        def policy_version(self) -> Fleet:
            self.calls += 1
            self.version = 2 if self.calls < 3 else 3
            return super().policy_version().model_copy(update={"control": Control(version=3)})

    answer = post("/get_weights_checksum", {}, weights=Late())
    assert answer.json() == {"transformer": DIGEST}


def test_memory_is_released_and_resumed_and_twice_is_once() -> None:
    weights = FakeWeights()
    for _ in range(2):
        answer = post("/release_memory_occupation", weights=weights)
        assert answer.json()["success"] is True and answer.json()["sleeping"] is True
        assert weights.run == "asleep"
    for _ in range(2):
        answer = post("/resume_memory_occupation", b"", weights=weights)
        assert answer.json()["success"] is True and answer.json()["sleeping"] is False
        assert weights.run == "running"


@pytest.mark.parametrize("route", ["release_memory_occupation", "resume_memory_occupation"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (
            Problem(code="deadline_exceeded", rule="was not done in time").exception(),
            504,
            "deadline_exceeded",
        ),
        (Problem(code="halted", rule="another update is under way").exception(), 503, "halted"),
        (OSError("disk on fire"), 500, "internal"),
    ],
)
def test_memory_that_is_neither_released_nor_resumed_is_told_in_that_servers_form(
    route: str, error: Exception, status: int, code: str
) -> None:
    weights = FakeWeights()
    weights.error = error
    answer = post(f"/{route}", weights=weights)
    told = answer.json()
    assert (answer.status_code, told["success"], told["code"]) == (status, False, code)
    assert told["rule"] in told["message"] and "sleeping" not in told
    assert "fire" not in answer.text
    assert weights.run == "running"
