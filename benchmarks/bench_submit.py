"""How long a trainer's thread is held by `submit`: ten times as many samples as the denoisers have slots.

Ten groups of 64 over 4 replicas of 16 slots each. Beside it, in turns: a call of a Serve handle per sample, for one group, which
is what a client without a loop of its own would at least do.

    python -m benchmarks.bench_submit
"""

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

from ray import serve
from ray.serve.handle import DeploymentResponse

from benchmarks.harness import Spread, ratio, report
from benchmarks.on_ray import cluster, deploy
from deployments.client import RolloutClient
from deployments.group import RolloutGroup

T = TypeVar("T")

NUM_REPLICAS, SLOTS, GROUP = 4, 16, 64
NUM_GROUPS = 10 * NUM_REPLICAS * SLOTS // GROUP
WAIT_S = 120.0


class Held:
    """What a piece of work took of its thread."""

    def __init__(self) -> None:
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []

    def measure(self, work: Callable[[], T], *, counts: bool) -> T:
        """Do the work; the first turn does not count."""
        wall, cpu = time.perf_counter(), time.thread_time()
        result = work()
        wall_ms, cpu_ms = 1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - cpu)
        if counts:
            self.wall_ms.append(wall_ms)
            self.cpu_ms.append(cpu_ms)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    ours, plain = Held(), Held()
    with cluster():
        deploy("brisk_app", {"default": {"num_replicas": NUM_REPLICAS, "max_ongoing_requests": SLOTS}})
        request = {"prompt": "a crowd", "num_samples": GROUP, "num_inference_steps": 100, "media": False}
        encoder = serve.get_deployment_handle("TextEncoder", "default")
        with RolloutClient.connect(max_bytes_in_flight=2**34) as client:

            def submitted() -> list[RolloutGroup]:
                return [client.submit(request) for _ in range(NUM_GROUPS)]

            def called() -> list[DeploymentResponse]:
                return [encoder.remote(request["prompt"]) for _ in range(GROUP)]

            for turn in range(args.turns + 1):
                groups = ours.measure(submitted, counts=turn > 0)
                for group in groups:
                    group.cancel()
                client.gather(groups, timeout_s=WAIT_S)
                for call in plain.measure(called, counts=turn > 0):
                    call.result(timeout_s=WAIT_S)
    taken = {"submit": (ours, NUM_GROUPS * GROUP), "a call per sample": (plain, GROUP)}
    calls_ms = [ms / GROUP for ms in plain.wall_ms]
    report(
        "submit",
        [
            {
                "by": name,
                "samples": count,
                "ms": Spread.of(held.wall_ms),
                "ms of CPU": Spread.of(held.cpu_ms),
                "per sample, calls over it": ratio(calls_ms, [ms / count for ms in held.wall_ms]),
            }
            for name, (held, count) in taken.items()
        ],
        notes=[f"{NUM_REPLICAS} replicas of {SLOTS} slots; mark: under 50 ms of the caller's own work"],
    )


if __name__ == "__main__":
    main()
