"""Step-level batching against one request at a time and against whole-request batches.

32 requests of 8 to 40 steps arrive at random moments. All three use the same model and the same moves; a whole-request
batch starts when the one before it has ended, takes up to 8 that wait, and lasts as long as its longest.

What batching can gain depends on what a row costs in a larger pass, which is measured in the same run. So there are two
models: the preset's own, and one whose pass takes the same time for 1 to 8 rows, as on a device that one row does not
fill. The second is simulated (it sleeps), and shows what the scheduler makes of such a device.

    python -m benchmarks.bench_batching
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import Spread, ratio, report, seconds
from benchmarks.in_process import InProcess, device
from benchmarks.sleeping import SleepingModel
from pipeline.engine import Engine
from pipeline.noise import draw
from pipeline.velocity import Row
from schemas.checks import geometry_of

NUM_REQUESTS = 32
BUCKETS = (1, 2, 4, 8)
SIMULATED_PASS_S = 0.02
SMALL_PICTURE = {"height": 64, "width": 96, "num_frames": 9}
"""For the sake of this benchmark's own time."""
GAP_IN_PASSES = 4
"""Mean time between two arrivals, in forward passes of one row: more work than one row at a time can do."""
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
    return _serve(here, here.engine(BUCKETS), work)


def one_at_a_time(here: InProcess, work: Sequence[Arrival]) -> Outcome:
    return _serve(here, here.engine((1,)), work)


def whole_request_batches(here: InProcess, work: Sequence[Arrival]) -> Outcome:
    """Only requests that wait when a batch starts are in it; the next starts when all of them are done."""
    started, waiting, latencies = time.perf_counter(), list(work), []
    engine = here.engine(BUCKETS)
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
            here.submit(engine, here.resolved(num_inference_steps=longest, **SMALL_PICTURE), k)
            for k in range(len(batch))
        ]
        for future in futures:
            future.result()
        done = time.perf_counter() - started
        latencies += [(arrival.num_steps, done - arrival.at_s) for arrival in batch]
    engine.stop()
    return _outcome(time.perf_counter() - started, latencies)


def _serve(here: InProcess, engine: Engine, work: Sequence[Arrival]) -> Outcome:
    started, latencies = time.perf_counter(), []
    futures: list[tuple[Arrival, Future[Any]]] = []
    for index, arrival in enumerate(work):
        time.sleep(max(0.0, arrival.at_s - (time.perf_counter() - started)))
        future = here.submit(
            engine, here.resolved(num_inference_steps=arrival.num_steps, **SMALL_PICTURE), index
        )

        def note(_: Future[Any], arrival: Arrival = arrival) -> None:
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


def compare(here: InProcess, pass_s: float, turns: int) -> dict[str, list[Outcome]]:
    """All contenders, turn by turn, with arrivals in proportion to a pass of one row."""
    work = arrivals(pass_s * GAP_IN_PASSES)
    contenders: dict[str, Callable[[InProcess, Sequence[Arrival]], Outcome]] = {
        "step-level": step_level,
        "one at a time": one_at_a_time,
        "whole-request batches": whole_request_batches,
    }
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, run in contenders.items():
            outcomes[name].append(run(here, work))
    return outcomes


def row_seconds(here: InProcess, repeats: int = 7) -> dict[int, list[float]]:
    """What a row costs in a forward pass of each size; the sizes take turns, after one turn that warms up."""
    of = geometry_of(here.resolved(**SMALL_PICTURE), here.card)
    to = here.model.device
    row = Row(
        latents={
            "video": draw(1, (of.num_video_tokens, of.video_channels)).to(to),
            "audio": draw(2, (of.audio_frames, of.audio_channels)).to(to),
        },
        sigma=torch.tensor(0.9),
        context=here.conditioning.positive,
    )

    def forward(num_rows: int) -> None:
        velocities = here.model([row] * num_rows, of)
        float(velocities["video"].sum())  # waits for the device

    costs: dict[int, list[float]] = {num_rows: [] for num_rows in BUCKETS}
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for num_rows in BUCKETS:
                took = seconds(lambda num_rows=num_rows: forward(num_rows)) / num_rows  # type: ignore[misc]
                if repeat:
                    costs[num_rows].append(took)
    return costs


@contextmanager
def simulated(here: InProcess) -> Iterator[None]:
    """A model in the preset's place whose pass takes the same time whatever its rows."""
    real, here.model = here.model, SleepingModel(SIMULATED_PASS_S)  # type: ignore[assignment]
    try:
        yield
    finally:
        here.model = real


def rows_of(model: str, outcomes: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    ours = outcomes["step-level"]
    return [
        {
            "model": model,
            "contender": name,
            "all done, s": Spread.of([o.total_s for o in found]),
            "short, median latency, s": Spread.of([o.short_latency_s for o in found]),
            "step-level's throughput over it": ratio([o.total_s for o in found], [o.total_s for o in ours]),
            "its short latency over step-level's": ratio(
                [o.short_latency_s for o in found], [o.short_latency_s for o in ours]
            ),
        }
        for name, found in outcomes.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    here = InProcess(args.preset, device())
    costs = row_seconds(here)
    real = compare(here, min(costs[1]), args.turns)
    with simulated(here):
        flat = compare(here, SIMULATED_PASS_S, args.turns)
    report(
        "batching",
        [*rows_of(args.preset, real), *rows_of("simulated: a pass takes the same for 1 to 8 rows", flat)],
        profile=[
            {
                "rows in a pass": num_rows,
                "ms per row": Spread.of([1000 * took for took in costs[num_rows]]),
                "at most so much faster than one row at a time": ratio(costs[1], costs[num_rows]),
            }
            for num_rows in BUCKETS
        ],
        notes=[
            f"{NUM_REQUESTS} requests of 8 to 40 steps; one arrives every {GAP_IN_PASSES} passes of one row, on average",
            f"{args.preset} on {here.model.device}, {torch.get_num_threads()} threads; the simulated pass sleeps {SIMULATED_PASS_S} s",
            "marks: throughput 1.5 over one at a time and 1.2 over whole-request batches; short latency 2",
        ],
    )


if __name__ == "__main__":
    main()
