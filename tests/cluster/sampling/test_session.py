"""A client and its process's connection to Ray: it ends with it or before it, and never brings up another.

Each trainer here is a process of its own. Where a call without a connection would start a cluster, RAY_ADDRESS lets it
join the tests' cluster again: the trainer tells whether it was connected once more.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import ray
from apps import App

from deployments.session import session_over

DEADLINE_S = 120

TRAINER = """
import atexit, json, sys, threading, time

told = {}


def is_open():
    return any(thread.name == "rollout-client" for thread in threading.enumerate())


def wait_until_over():
    "Until the client's thread has ended, or its process is connected to Ray again."
    end = time.monotonic() + 60
    while is_open() and not ray.is_initialized() and time.monotonic() < end:
        time.sleep(0.02)
    return {"connected": ray.is_initialized(), "open": is_open()}


@atexit.register
def last_of_all():
    print(json.dumps(told | {"after Ray": wait_until_over(), "problems": problems()}), flush=True)


import ray
from deployments.client import RolloutClient


@atexit.register
def before_ray_leaves():
    told["before Ray"] = {"connected": ray.is_initialized(), "open": is_open()}


def problems():
    return sorted({problem.rule for group in groups for problem in group.problems})


ray.init(sys.argv[1], log_to_driver=False)
client = RolloutClient.connect("plain")
request = {"prompt": "a long way", "num_samples": 8, "num_inference_steps": 100, "media": False}
groups = [client.submit(request) for _ in range(int(sys.argv[2]))]
while groups and not any(sample.steps_done for sample in groups[0].samples):
    time.sleep(0.02)
"""

SHUTS_RAY_DOWN = """
ray.shutdown()
told["after shutdown"] = wait_until_over()
client.gather(groups, timeout_s=60)
told["refused"] = []
for call in (client.policy_version, lambda: client.submit(request)):
    try:
        call()
    except RuntimeError as error:
        told["refused"].append(str(error))
client.close()
client.close()
"""

JOINS_ANEW = """
ray.shutdown()
ray.init(sys.argv[1], log_to_driver=False)
end = time.monotonic() + 60
while is_open() and time.monotonic() < end:
    time.sleep(0.02)
told["open"] = is_open()
with RolloutClient.connect("plain") as another:
    (group,) = another.gather([another.submit(request | {"num_samples": 1})], timeout_s=60)
    told["done"] = group.samples[0].done
"""

OVER = {"connected": False, "open": False}


def told_by(script: str, num_groups: int) -> dict[str, Any]:
    """What a trainer with an open client tells, after it did what the script says and left."""
    address = ray.get_runtime_context().gcs_address
    trainer = subprocess.run(
        [sys.executable, "-c", TRAINER + script, address, str(num_groups)],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert trainer.returncode == 0, trainer.stderr[-2000:]
    told: dict[str, Any] = json.loads(trainer.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("num_groups", [0, 5], ids=["idle", "more than there is room for"])
def test_a_client_ends_when_ray_is_shut_down_and_starts_none(plain: App, num_groups: int) -> None:
    told = told_by(SHUTS_RAY_DOWN, num_groups)
    assert told["after shutdown"] == told["after Ray"] == OVER
    assert told["problems"] == ([session_over().rule] if num_groups else [])
    assert session_over().rule in told["refused"][0] and "closed" in told["refused"][1]
    plain.idle()


@pytest.mark.parametrize("num_groups", [0, 5], ids=["idle", "more than there is room for"])
def test_a_client_that_nobody_closes_is_closed_before_ray_leaves(plain: App, num_groups: int) -> None:
    told = told_by("", num_groups)
    assert told["before Ray"] == {"connected": True, "open": False}
    assert told["after Ray"] == OVER
    assert told["problems"] == (["the group was cancelled by its caller"] if num_groups else [])
    plain.idle()


def test_a_client_is_of_one_session_and_the_next_takes_another(plain: App) -> None:
    told = told_by(JOINS_ANEW, 0)
    assert not told["open"] and told["done"]
