"""How much of a step is not the model: the engine's own time per step, with a batch of 4 on `small`.

python -m benchmarks.bench_engine_overhead
"""

import argparse
from typing import Any

from benchmarks.harness import Spread, report
from benchmarks.in_process import InProcess, device

BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    here = InProcess(args.preset, device())
    rows = []
    requests: dict[str, dict[str, Any]] = {
        "sde, 3 stochastic steps": {"stochastic_steps": [2, 3, 4]},
        "sde, every step stochastic and kept": {"return_steps": "all"},
    }
    for name, fields in requests.items():
        shares, per_step = [], []
        for turn in range(args.turns + 1):
            engine = here.engine((BATCH,))
            request = here.resolved(num_samples=BATCH, **fields)
            for future in [here.submit(engine, request, k) for k in range(BATCH)]:
                future.result()
            engine.stop()
            stats = engine.stats
            if turn:
                shares.append(1 - stats.forward_s / stats.busy_s)
                per_step.append((stats.busy_s - stats.forward_s) / stats.ticks * 1000)
        rows.append(
            {
                "request": name,
                "engine's share of a step": Spread.of(shares),
                "engine, ms per step of 4": Spread.of(per_step),
            }
        )
    report(
        "engine_overhead", rows, notes=[f"preset {args.preset}, batch of {BATCH}; mark: share at most 0.03"]
    )


if __name__ == "__main__":
    main()
