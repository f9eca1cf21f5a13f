"""Step-level batching against one request at a time and against whole-request batches.

32 requests of 8 to 40 steps arrive at random moments. All three use the same model and the same moves; a whole-request
batch starts when the one before it has ended, takes up to 8 that wait, and lasts as long as its longest.

    python -m benchmarks.bench_batching
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from benchmarks.harness import Spread, ratio, report
from benchmarks.in_process import InProcess, device
from pipeline.engine import Engine, Finished

NUM_REQUESTS = 32
SHORT_STEPS = 12
"""Requests of at most so many steps count as short."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    at_s: float
    num_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    total_s: float
    short_latency_s: float


def arrivals(mean_gap_s: float) -> list[Arrival]:
    """The same for every contender and turn."""
    rng, moment, made = random.Random(0), 0.0, []
    for _ in range(NUM_REQUESTS):
        moment += rng.expovariate(1 / mean_gap_s)
        made.append(Arrival(at_s=moment, num_steps=rng.choice((8, 10, 12, 20, 30, 40))))
    return made


def step_level(here: InProcess, work: Sequence[Arrival]) -> Outcome:
    return _serve(here, here.engine((1, 2, 4, 8)), work)


def one_at_a_time(here: InProcess, work: Sequence[Arrival]) -> Outcome:
    return _serve(here, here.engine((1,)), work)


def whole_request_batches(here: InProcess, work: Sequence[Arrival]) -> Outcome:
    """Only requests that wait when a batch starts are in it; the next starts when all of them are done."""
    started, waiting, latencies = time.perf_counter(), list(work), []
    engine = here.engine((1, 2, 4, 8))
    while waiting:
        now = time.perf_counter() - started
        batch = [arrival for arrival in waiting if arrival.at_s <= now][:8]
        if not batch:
            time.sleep(waiting[0].at_s - now)
            continue
        waiting = [arrival for arrival in waiting if arrival not in batch]
        longest = max(arrival.num_steps for arrival in batch)
        # Every row runs to the longest request's last step, as a pipeline call on the batch would.
        futures = [
            here.submit(engine, here.resolved(num_inference_steps=longest), k) for k in range(len(batch))
        ]
        for future in futures:
            future.result()
        done = time.perf_counter() - started
        latencies += [(arrival.num_steps, done - arrival.at_s) for arrival in batch]
    engine.stop()
    return _outcome(time.perf_counter() - started, latencies)


def _serve(here: InProcess, engine: Engine, work: Sequence[Arrival]) -> Outcome:
    started, latencies = time.perf_counter(), []
    futures: list[tuple[Arrival, Future[Finished]]] = []
    for index, arrival in enumerate(work):
        time.sleep(max(0.0, arrival.at_s - (time.perf_counter() - started)))
        future = here.submit(engine, here.resolved(num_inference_steps=arrival.num_steps), index)

        def note(_: Future[Finished], arrival: Arrival = arrival) -> None:
            latencies.append((arrival.num_steps, time.perf_counter() - started - arrival.at_s))

        future.add_done_callback(note)
        futures.append((arrival, future))
    for _, future in futures:
        future.result()
    engine.stop()
    return _outcome(time.perf_counter() - started, latencies)


def _outcome(total_s: float, latencies: Sequence[tuple[int, float]]) -> Outcome:
    short = [latency for num_steps, latency in latencies if num_steps <= SHORT_STEPS]
    return Outcome(total_s=total_s, short_latency_s=Spread.of(short).median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    here = InProcess(args.preset, device())
    work = arrivals(_one_step_s(here) * 4)
    contenders: dict[str, Callable[[InProcess, Sequence[Arrival]], Outcome]] = {
        "step-level": step_level,
        "one at a time": one_at_a_time,
        "whole-request batches": whole_request_batches,
    }
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contenders}
    for _ in range(args.turns):
        for name, run in contenders.items():
            outcomes[name].append(run(here, work))
    ours = outcomes["step-level"]
    report(
        "batching",
        [
            {
                "contender": name,
                "all done, s": Spread.of([o.total_s for o in found]),
                "short, median latency, s": Spread.of([o.short_latency_s for o in found]),
                "step-level's throughput over it": ratio(
                    [o.total_s for o in found], [o.total_s for o in ours]
                ),
                "its short latency over step-level's": ratio(
                    [o.short_latency_s for o in found], [o.short_latency_s for o in ours]
                ),
            }
            for name, found in outcomes.items()
        ],
        notes=[
            f"preset {args.preset}, {NUM_REQUESTS} requests of 8 to 40 steps",
            "marks: throughput 1.5 over one at a time and 1.2 over whole-request batches; short latency 2",
        ],
    )


def _one_step_s(here: InProcess) -> float:
    engine = here.engine((1,))
    here.submit(engine, here.resolved(num_inference_steps=8)).result()
    here.submit(engine, here.resolved(num_inference_steps=8)).result()
    engine.stop()
    return engine.stats.busy_s / engine.stats.ticks


if __name__ == "__main__":
    main()
