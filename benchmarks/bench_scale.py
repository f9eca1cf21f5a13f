"""Many denoisers and one trainer: do they idle, and how many could one client feed?

The transformer sleeps for a GPU's step instead of computing, so that this machine can play many GPUs; all else is real.

    python -m benchmarks.bench_scale --replicas 1 2 4 8 16
"""

import argparse
import time
from typing import Any

from ray import serve

from benchmarks.harness import report
from benchmarks.on_ray import STEP_S, SleepingDenoiser, cluster, statuses
from configs.settings import AppConfig
from deployments.client import RolloutClient
from deployments.graph import bind

NUM_STEPS, SAMPLES_PER_REPLICA = 10, 6
REAL_STEPS, REAL_STEP_S = 30, 0.2
"""For the estimate: one sample of LTX-2.3 on one GPU that takes one row at a time."""


def measure(num_replicas: int) -> dict[str, Any]:
    config = AppConfig.model_validate({"preset": "tiny", "denoiser": {"row_buckets": [1]}})
    app = bind(
        config,
        denoiser=SleepingDenoiser,
        options={
            "Denoiser": {
                "num_replicas": num_replicas,
                "max_ongoing_requests": 3,
                "ray_actor_options": {"num_cpus": 1},
            }
        },
    )
    serve.run(app, route_prefix=None)
    with RolloutClient.connect() as client:
        request = {"prompt": "a red ball", "num_inference_steps": NUM_STEPS, "media": False}
        client.gather([client.submit({**request, "num_samples": min(64, 2 * num_replicas)})])  # warm
        before = {status["replica_id"]: status["stats"] for status in statuses()}
        samples = num_replicas * SAMPLES_PER_REPLICA
        groups, size = divmod(samples, 8)
        started, cpu = time.perf_counter(), time.process_time()
        sizes = [8] * groups + ([size] if size else [])
        client.gather([client.submit({**request, "num_samples": count}) for count in sizes])
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        forward = [s["stats"]["forward_s"] - before[s["replica_id"]]["forward_s"] for s in statuses()]
    serve.delete("default")
    return {
        "replicas": num_replicas,
        "samples": samples,
        "wall, s": wall_s,
        "busy share, mean": sum(forward) / num_replicas / wall_s,
        "busy share, least": min(forward) / wall_s,
        "client's CPU per sample, ms": cpu_s / samples * 1000,
        "GPUs one client feeds": int(REAL_STEPS * REAL_STEP_S / (cpu_s / samples)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    args = parser.parse_args()
    with cluster():
        rows = [measure(count) for count in args.replicas]
    report(
        "scale",
        rows,
        notes=[
            f"a step sleeps {STEP_S} s; {NUM_STEPS} steps a sample, one row at a time; wall from the first submit on",
            "mark: busy share at least 0.95 at each count",
            f"GPUs fed: {REAL_STEPS} steps of {REAL_STEP_S} s over the client's CPU time per sample, one core",
        ],
    )


if __name__ == "__main__":
    main()
