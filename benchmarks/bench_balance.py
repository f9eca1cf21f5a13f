"""How evenly bursts spread over the denoisers: this project's router against Serve's own.

Bursts of mixed sizes leave one or three processes at once; a denoiser's step sleeps, one row at a time. A burst is a
group, and a group is done when its last sample is. Two apps that differ in the router alone run side by side and take
turns.

    python -m benchmarks.bench_balance
"""

import argparse
import time
from typing import Any

import ray
from ray.serve.config import RequestRouterConfig

from benchmarks.harness import Spread, ratio, report
from benchmarks.on_ray import BriskDenoiser, cluster, deploy, statuses
from deployments.client import RolloutClient

BURSTS = (4, 8, 16)
NUM_STEPS = 3
MAX_ONGOING = 12
"""Calls that a denoiser takes at a time, as docs/operations.md advises."""
ROUTERS: dict[str, dict[str, Any]] = {
    "ours": {},
    "serves": {"request_router_config": RequestRouterConfig().model_dump()},
}
"""Options of the denoiser, by app."""


@ray.remote(num_cpus=0)
class Caller:
    """A process with a client of its own for each app."""

    def __init__(self) -> None:
        self.clients = {app_name: RolloutClient.connect(app_name) for app_name in ROUTERS}

    def burst(self, app_name: str, size: int) -> float:
        """Seconds until the whole group of ``size`` was done."""
        client = self.clients[app_name]
        request = {"prompt": "a red ball", "num_inference_steps": NUM_STEPS, "media": False}
        started = time.perf_counter()
        client.gather([client.submit({**request, "num_samples": size})])
        return time.perf_counter() - started


class Figures:
    """What one router did with the bursts."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        """Per burst, the largest replica's share over the mean."""
        self.times: list[float] = []
        """Per turn, seconds of all bursts' slowest groups."""
        self.loads: list[float] = []
        """Per turn, calls of all bursts' busiest replicas."""

    def turn(self, app_name: str, callers: list[Any], num_replicas: int) -> None:
        total, load = 0.0, 0
        for size in BURSTS:
            before = done_by_replica(app_name)
            total += max(ray.get([caller.burst.remote(app_name, size) for caller in callers]))
            done = [count - before[replica] for replica, count in done_by_replica(app_name).items()]
            load += max(done)
            if sum(done) % num_replicas == 0:  # else even an even spread has a largest share
                self.shares.append(max(done) / (sum(done) / num_replicas))
        self.times.append(total)
        self.loads.append(load)


def done_by_replica(app_name: str) -> dict[str, int]:
    return {status["replica_id"]: status["stats"]["done"] for status in statuses(app_name)}


def measure(num_replicas: int, callers: list[Any], turns: int) -> dict[str, Any]:
    figures = {app_name: Figures() for app_name in ROUTERS}
    for turn in range(turns + 1):
        for app_name in ROUTERS:
            if turn:
                figures[app_name].turn(app_name, callers, num_replicas)
            else:
                ray.get([caller.burst.remote(app_name, 4) for caller in callers])
    ours, theirs = figures["ours"], figures["serves"]
    return {
        "replicas": num_replicas,
        "callers": len(callers),
        "largest share over mean, ours": Spread.of(ours.shares),
        "Serve's": Spread.of(theirs.shares),
        "time of the groups, ours over Serve's": ratio(ours.times, theirs.times),
        "calls of the busiest replicas, ours over Serve's": ratio(ours.loads, theirs.loads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-ongoing", type=int, default=MAX_ONGOING)
    args = parser.parse_args()
    rows = []
    with cluster():
        for num_replicas in args.replicas:
            options = {"num_replicas": num_replicas, "max_ongoing_requests": args.max_ongoing}
            deploy("brisk_app", {app_name: {**options, **router} for app_name, router in ROUTERS.items()})
            callers = [Caller.remote() for _ in range(3)]  # type: ignore[attr-defined]
            rows += [measure(num_replicas, callers[:count], args.turns) for count in (1, 3)]
            for caller in callers:
                ray.kill(caller)
    report(
        "balance",
        rows,
        notes=[
            f"bursts of {BURSTS} calls per caller at once; shares of bursts that divide evenly",
            f"a call is {NUM_STEPS} steps of {BriskDenoiser.STEP_S} s; a replica takes one row at a time, and up to {args.max_ongoing} calls",
            "the busiest replica's calls bound the time from below: what is above their ratio is the same for both routers",
            "marks: largest share at most 1.15 from one process, 1.35 from three; time at most 0.7 of Serve's",
        ],
    )


if __name__ == "__main__":
    main()
