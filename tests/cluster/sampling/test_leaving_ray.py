"""A process that leaves Ray with a client still open starts no cluster by that."""

import os
import subprocess
import sys

import ray
from apps import App

DEADLINE_S = 120
TRAINER = """
import sys, time
import ray
from deployments.client import RolloutClient

ray.init(sys.argv[1], log_to_driver=False)
client = RolloutClient.connect("plain")
client.gather([client.submit({"prompt": "a red ball", "num_inference_steps": 2, "media": False})], timeout_s=60)
ray.shutdown()
end = time.monotonic() + 30
while not client._renewal.done() and not ray.is_initialized() and time.monotonic() < end:
    time.sleep(0.02)
assert client._renewal.done() and not ray.is_initialized(), "the lease is renewed no longer"
client.close()
assert not ray.is_initialized() and not client._thread.is_alive()
print("left")
"""


def test_an_idle_client_outlives_its_session_and_starts_none(plain: App) -> None:
    # A call without a connection would join the tests' cluster, which it is told of here, and not start one.
    address = ray.get_runtime_context().gcs_address
    process = subprocess.run(
        [sys.executable, "-c", TRAINER, address],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert process.stdout.endswith("left\n"), process.stderr[-2000:]
