"""The HTTP way, through Serve's own proxy: answers, refusals in words, and what happens to work that nobody waits for."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from apps import MAX_ROLLOUTS, App, until
from variants import SLOWLY

ROLLOUTS = "/v1/rollouts"
PROBLEM = {"code", "field", "value", "rule", "remedy"}


def test_a_rollout_is_answered_with_its_numbers(plain: App) -> None:
    request = {"prompt": "a red ball", "num_samples": 2, "seed": 7, "request_id": "mine"}
    with plain.http() as http:
        answer = http.post(ROLLOUTS, json=request)
    assert answer.status_code == 200
    summary = answer.json()
    assert summary["request_id"] == "mine"
    assert summary["request"]["num_inference_steps"] == 6 and summary["request"]["seed"] == 7
    assert len(summary["sigmas"]) == 7 and summary["sigmas"][-1] == 0
    assert len(summary["conditioning_digest"]) > 0
    for index, sample in enumerate(summary["samples"]):
        assert (sample["sample_index"], sample["seed"], sample["attempt"]) == (index, 7, 1)
        assert sample["problem"] is None
        assert len(sample["log_probs_video"]) == len(sample["log_probs_audio"]) == 6
        assert all(isinstance(x, float) for x in sample["log_probs_video"] + sample["log_probs_audio"])
        assert sample["trajectory_bytes"] > 0 and sample["media_bytes"] > 0
        assert sample["timings"]["denoise_s"] > 0


def test_health_docs_and_schema_answer(plain: App) -> None:
    with plain.http() as http:
        assert http.get("/health").json() == {"status": "ok", "checkpoint": "tiny"}
        docs = http.get("/docs")
        assert docs.status_code == 200 and "swagger" in docs.text.lower()
        schema = http.get("/openapi.json").json()
    post = schema["paths"][ROLLOUTS]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/RolloutRequest")
    assert post["responses"].keys() >= {"200", "413", "422", "503", "504"}
    assert "prompt" in schema["components"]["schemas"]["RolloutRequest"]["required"]


@pytest.mark.parametrize(
    ("request_", "field", "value", "said"),
    [
        ({"prompt": "a", "num_step": 3}, "num_step", 3, "known field"),
        ({"prompt": "a", "num_frames": 120}, "num_frames", 120, "8k + 1"),
        ({"prompt": "a", "image": "cat.png"}, "image", "cat.png", "image inputs"),
        ({"prompt": "  "}, "prompt", "  ", "empty"),
        ({"prompt": "word " * 1000}, "prompt", None, "tokens"),
        ({"prompt": "a", "num_samples": 9}, "num_samples", 9, "http.max_num_samples"),
        ({"prompt": "a", "guidance": {"video": "high"}}, "guidance.video", "high", "number"),
        (
            {"prompt": "a", "transition": {"video": {"kind": "sdee"}}},
            "transition.video.kind",
            "sdee",
            "'sde'",
        ),
        ({}, "prompt", None, "required"),
    ],
)
def test_a_request_that_cannot_be_sampled_is_refused_in_words(
    plain: App, request_: dict[str, Any], field: str, value: object, said: str
) -> None:
    with plain.http() as http:
        answer = http.post(ROLLOUTS, json=request_)
    assert answer.status_code == 422
    problem = answer.json()
    assert problem.keys() >= PROBLEM
    assert problem["code"] == "invalid_request" and problem["field"] == field
    assert said in problem["rule"] or said in problem["remedy"]
    if value is not None:
        assert problem["value"] == value
    assert problem["remedy"] or field in ("guidance.video", "prompt")


@pytest.mark.parametrize("body", [b'{"prompt": "a red ball",', b"", b"[1, 2]", b'"a red ball"'])
def test_a_body_that_is_no_request_is_refused_in_words(plain: App, body: bytes) -> None:
    with plain.http() as http:
        answer = http.post(ROLLOUTS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    problem = answer.json()
    assert problem.keys() >= PROBLEM and problem["code"] == "invalid_request"
    assert problem["rule"].startswith(("must be", "is required")) and problem["remedy"]
    assert problem["field"] in (None, "body")


def test_a_body_over_the_limit_is_refused_however_it_is_sent(plain: App) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(30):
            yield b"a" * 1000
        yield b'"}'

    long = {"prompt": "a" * 30_000}
    with plain.http() as http:
        for answer in (http.post(ROLLOUTS, json=long), http.post(ROLLOUTS, content=chunks())):
            assert answer.status_code == 413
            problem = answer.json()
            assert problem.keys() >= PROBLEM and problem["field"] == "body"
            assert "http.max_body_bytes" in problem["rule"] and "20000" in problem["rule"]
        in_chunks = iter([b'{"prompt": ', b'"a red ball", "media": false}'])
        short = http.post(ROLLOUTS, content=in_chunks, headers={"content-type": "application/json"})
        assert short.status_code == 200


def test_more_rollouts_than_may_be_answered_at_a_time_are_told_to_try_again(plain: App) -> None:
    request = {"prompt": f"a door opens {SLOWLY}", "media": False}
    with plain.http() as http, ThreadPoolExecutor(MAX_ROLLOUTS + 4) as callers:
        assert http.post(ROLLOUTS, json=request).status_code == 200
        answers = list(callers.map(lambda _: http.post(ROLLOUTS, json=request), range(MAX_ROLLOUTS + 4)))
        refused = [answer for answer in answers if "http.max_rollouts" in answer.text]
        assert len(refused) == 4
        for answer in refused:
            assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
            assert answer.json()["code"] == "queue_full" and "try again" in answer.json()["remedy"]
        assert http.post(ROLLOUTS, json=request).status_code == 200, "room again"


def test_a_full_denoiser_is_told_to_the_caller(plain: App) -> None:
    long = {"prompt": "a long way", "num_inference_steps": 100, "num_samples": 4, "media": False}
    single = {"prompt": "one more", "media": False}
    with plain.http() as http, ThreadPoolExecutor(MAX_ROLLOUTS) as callers:
        running = []
        for num_samples in (4, 8):
            running.append(callers.submit(http.post, ROLLOUTS, json=long))
            until(lambda num_samples=num_samples: len(plain.held()) == num_samples)
        # One of these starts, four wait, and the others are turned away.
        singles = list(callers.map(lambda _: http.post(ROLLOUTS, json=single), range(10)))
        for call in running:
            assert call.result().status_code == 200
            assert not any(sample["problem"] for sample in call.result().json()["samples"])
    assert {answer.status_code for answer in singles} == {200, 503}
    for answer in singles:
        if answer.status_code == 503:
            assert answer.headers["Retry-After"] == "1" and answer.json()["code"] == "queue_full"
            assert "max_queued_requests" in answer.json()["rule"]
