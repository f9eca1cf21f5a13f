"""Many denoisers and one trainer: do they idle, and how many could one client feed?

The transformer sleeps for a GPU's step instead of computing, so that this machine can play many GPUs; all else is real.

    python -m benchmarks.bench_scale --replicas 1 2 4 8 16
"""

import argparse
import time
from statistics import mean

from benchmarks.harness import Row, Spread, report
from benchmarks.on_ray import SlowDenoiser, cluster, deploy, statuses
from deployments.client import RolloutClient

NUM_STEPS, SAMPLES_PER_REPLICA = 30, 4
MAX_ONGOING = 3
"""Calls that a denoiser of one row takes at a time: that row, and a small waiting room."""


def measure(num_replicas: int) -> tuple[Row, Row]:
    """The figures of so many replicas, and where they idled."""
    deploy("slow_app", {"default": {"num_replicas": num_replicas, "max_ongoing_requests": MAX_ONGOING}})
    with RolloutClient.connect() as client:
        request = {"prompt": "a red ball", "num_inference_steps": NUM_STEPS, "media": False}
        warm_up = {**request, "num_inference_steps": 2, "num_samples": min(64, 2 * num_replicas)}
        client.gather([client.submit(warm_up)])
        samples = num_replicas * SAMPLES_PER_REPLICA
        groups, size = divmod(samples, 8)
        sizes = [8] * groups + ([size] if size else [])
        began, cpu = time.monotonic(), time.process_time()
        client.gather([client.submit({**request, "num_samples": count}) for count in sizes])
        ended, cpu_s = time.monotonic(), time.process_time() - cpu
    wall_s = ended - began
    passes = [[one for one in status["passes"] if one[0] > began] for status in statuses()]
    busy = [sum(end - begin for begin, end in own) for own in passes]
    before, after = [own[0][0] - began for own in passes], [ended - own[-1][1] for own in passes]
    idle_between = [wall_s - sum(parts) for parts in zip(busy, before, after, strict=True)]
    figures = {
        "replicas": num_replicas,
        "samples": samples,
        "wall, s": wall_s,
        "busy share, mean": mean(busy) / wall_s,
        "busy share, least": min(busy) / wall_s,
        "client's CPU per sample, ms": cpu_s / samples * 1000,
        "GPUs one client feeds": int(NUM_STEPS * SlowDenoiser.STEP_S / (cpu_s / samples)),
    }
    profile = {
        "replicas": num_replicas,
        "idle before the first step, s": Spread.of(before),
        "between steps, s": Spread.of(idle_between),
        "after the last step, s": Spread.of(after),
        "samples of a replica": Spread.of([len(own) / NUM_STEPS for own in passes]),
    }
    return figures, profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    args = parser.parse_args()
    with cluster():
        measured = [measure(count) for count in args.replicas]
    report(
        "scale",
        [figures for figures, _ in measured],
        profile=[profile for _, profile in measured],
        notes=[
            f"a step sleeps {SlowDenoiser.STEP_S} s; {NUM_STEPS} steps a sample, one row at a time; wall from the first submit on",
            "mark: busy share at least 0.95 at each count",
            "GPUs fed: the time of a sample over the client's CPU time for it, on one core",
        ],
    )


if __name__ == "__main__":
    main()
