"""How HTTP calls end early: at their deadline, and when the caller hangs up."""

import json
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

from apps import READY_S, App, until

ROLLOUTS = "/v1/rollouts"


def test_what_is_not_done_by_its_deadline_is_a_timeout(four: App) -> None:
    with four.http() as http:
        answer = http.post(
            ROLLOUTS, json={"prompt": "too long", "num_inference_steps": 100, "deadline_s": 5, "media": False}
        )
    assert answer.status_code == 504
    problem = answer.json()
    assert (problem["code"], problem["field"], problem["value"]) == ("deadline_exceeded", "deadline_s", 5)
    assert "of 100" in problem["rule"] and problem["remedy"]
    four.idle()


def test_work_stops_when_the_caller_hangs_up(four: App) -> None:
    request = {"prompt": "left alone", "num_inference_steps": 100, "num_samples": 8, "media": False}
    before = four.ask("Denoiser")
    address = urlsplit(four.url)
    caller = HTTPConnection(address.netloc, timeout=READY_S)
    with closing(caller):
        caller.request(
            "POST", address.path + ROLLOUTS, json.dumps(request), {"content-type": "application/json"}
        )
        until(lambda: len(four.held()) == 8)
    four.idle()
    after = four.ask("Denoiser")
    assert sum(status["num_calls"] for status in after) - sum(status["num_calls"] for status in before) == 8
    num_steps = sum(status["num_forwards"] for status in after) - sum(
        status["num_forwards"] for status in before
    )
    assert num_steps < 4 * 100, "none of the four that had started ran to its end"
