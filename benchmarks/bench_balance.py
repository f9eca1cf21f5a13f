"""How evenly bursts spread over the denoisers: this project's router against Serve's own.

Bursts of mixed sizes leave one or three processes; a denoiser's step sleeps. A burst is a group, and a group is done
when its last sample is.

    python -m benchmarks.bench_balance
"""

import argparse
import time
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from benchmarks.harness import Spread, report
from benchmarks.on_ray import SleepingDenoiser, cluster, statuses
from configs.settings import AppConfig
from deployments.client import RolloutClient
from deployments.graph import bind

BURSTS = (4, 8, 16)
NUM_STEPS = 4


@ray.remote(num_cpus=0)
class Caller:
    """A process with a client of its own."""

    def __init__(self) -> None:
        self.client = RolloutClient.connect()

    def burst(self, size: int) -> float:
        request = {"prompt": "a red ball", "num_inference_steps": NUM_STEPS, "media": False}
        started = time.perf_counter()
        self.client.gather([self.client.submit({**request, "num_samples": size})])
        return time.perf_counter() - started


def measure(num_replicas: int, num_callers: int, default_router: bool, turns: int) -> dict[str, Any]:
    config = AppConfig.model_validate({"preset": "tiny", "denoiser": {"row_buckets": [1]}})
    options: dict[str, Any] = {
        "num_replicas": num_replicas,
        "max_ongoing_requests": 64,
        "ray_actor_options": {"num_cpus": 1},
    }
    if default_router:
        options["request_router_config"] = RequestRouterConfig()
    serve.run(bind(config, denoiser=SleepingDenoiser, options={"Denoiser": options}), route_prefix=None)
    callers = [Caller.remote() for _ in range(num_callers)]
    ray.get([caller.burst.remote(4) for caller in callers])
    shares, times = [], []
    for _ in range(turns):
        for size in BURSTS:
            before = {status["replica_id"]: status["stats"]["done"] for status in statuses()}
            times.append(max(ray.get([caller.burst.remote(size) for caller in callers])))
            done = [status["stats"]["done"] - before[status["replica_id"]] for status in statuses()]
            if sum(done) % num_replicas == 0:  # else even an even spread has a largest share
                shares.append(max(done) / (sum(done) / num_replicas))
    for caller in callers:
        ray.kill(caller)
    serve.delete("default")
    return {"share": shares, "time": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    rows = []
    with cluster():
        for num_replicas in args.replicas:
            for num_callers in (1, 3):
                ours = measure(num_replicas, num_callers, False, args.turns)
                theirs = measure(num_replicas, num_callers, True, args.turns)
                rows.append(
                    {
                        "replicas": num_replicas,
                        "callers": num_callers,
                        "largest share over mean, ours": Spread.of(ours["share"]),
                        "Serve's": Spread.of(theirs["share"]),
                        "group time, ours over Serve's": sum(ours["time"]) / sum(theirs["time"]),
                    }
                )
    report(
        "balance",
        rows,
        notes=[
            f"bursts of {BURSTS} calls per caller at once; shares of bursts that divide evenly",
            "marks: 1.15 from one process, 1.35 from three; group time 0.7 of Serve's",
        ],
    )


if __name__ == "__main__":
    main()
