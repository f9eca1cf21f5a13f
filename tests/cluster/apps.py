"""How tests run an app on the cluster, and reach it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve import Application

from deployments.client import RolloutClient
from deployments.weights.handle import find_store

NUM_DENOISERS = 4
ROOM_OF_PLAIN = {"max_ongoing_requests": 9, "max_queued_requests": 4}
"""Calls that the denoiser of `plain` takes: its eight rows, and one to ask for its status. And those that wait for it."""
MAX_ROLLOUTS = 12
"""That `plain` answers over HTTP at a time."""
KEEP_BYTES = 10 * 2**20
"""Of rollouts that `plain` keeps."""
EXPORT_S = 2.5
"""Between two exports of a process's metrics."""
READY_S = 240.0
"""Longest wait for anything that is bound to happen, on a busy machine."""


class App:
    """A running app, as tests reach it."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}/{name}"

    def client(self, **options: Any) -> RolloutClient:
        return RolloutClient.connect(self.name, **options)

    def http(self, timeout_s: float = READY_S) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s)

    def ask(self, deployment: str, method: str = "status") -> list[Any]:
        """What every replica of a deployment answers."""
        answers = serve.get_deployment_handle(deployment, self.name).broadcast(method).results()
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def held(self) -> dict[str, tuple[int, int]]:
        """Steps done and in all of every sample that the denoisers hold, by sample id."""
        return {key: steps for status in self.ask("Denoiser") for key, steps in status["progress"].items()}

    def idle(self) -> None:
        """Wait until all denoisers are there and none holds a sample."""
        until(lambda: [status["progress"] for status in self.ask("Denoiser")] == [{}] * self._num_denoisers())

    def _num_denoisers(self) -> int:
        deployments = serve.status().applications[self.name].deployments
        return sum(deployments["Denoiser"].replica_states.values())


@contextmanager
def deployed(name: str, app: Application, port: int) -> Iterator[App]:
    """Run an app under its own name and route until the block ends."""
    serve.run(app, name=name, route_prefix=f"/{name}")
    try:
        yield App(name, port)
    finally:
        remove(name)


def remove(name: str) -> None:
    """Delete an app with all that it leaves behind."""
    serve.delete(name)
    with suppress(RuntimeError):  # of an app that did not get so far
        ray.kill(find_store(name))


def until(holds: Callable[[], Any], timeout_s: float = READY_S) -> Any:
    """What ``holds`` returned once it was true; raises TimeoutError when it never is.

    Looks often at first, and ever less: what takes long takes processors too.
    """
    end, pause_s = time.monotonic() + timeout_s, 0.02
    while not (found := holds()):
        if time.monotonic() > end:
            raise TimeoutError("it did not come to pass")
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.3)
    return found
