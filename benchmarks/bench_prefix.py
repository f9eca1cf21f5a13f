"""A shared prefix against none: a group of 8 whose stochastic window is 4 steps from step 10 of 20.

python -m benchmarks.bench_prefix
"""

import argparse

from benchmarks.harness import Spread, ratio, report, seconds, take_turns
from benchmarks.in_process import InProcess, device
from pipeline.sample import Prefix

GROUP, WINDOW, NUM_STEPS = 8, (10, 11, 12, 13), 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    here = InProcess(args.preset, device())
    engine = here.engine((1, 2, 4, 8))

    def group(shared: bool) -> None:
        request = here.resolved(
            num_samples=GROUP,
            num_inference_steps=NUM_STEPS,
            stochastic_steps=list(WINDOW),
            shared_initial_noise=True,
            shared_prefix=shared,
        )
        prefix = None
        if shared:
            sample = here.submit(engine, request, until=WINDOW[0]).result().sample
            prefix = Prefix(
                states=tuple(sample.kept),
                places=tuple(sample.places),
                policy_versions=tuple(sample.policy_versions),
            )
        for future in [here.submit(engine, request, k, prefix=prefix) for k in range(GROUP)]:
            future.result()

    figures = take_turns(
        {"not shared": lambda: seconds(lambda: group(False)), "shared": lambda: seconds(lambda: group(True))},
        turns=args.turns,
    )
    engine.stop()
    report(
        "prefix",
        [
            {
                "group of 8": name,
                "seconds": Spread.of(values),
                "speed over not shared": ratio(figures["not shared"], values),
            }
            for name, values in figures.items()
        ],
        notes=[f"preset {args.preset}, window {WINDOW} of {NUM_STEPS} steps; mark: 1.5"],
    )


if __name__ == "__main__":
    main()
