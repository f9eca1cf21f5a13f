"""`make grpo`: start the app, learn with GRPO from several seeds, and from each with shuffled advantages; draw what came of it.

    serve run serve_config.yaml --address local
    python -m examples.grpo.train --seed 0 --out out/grpo/seed-0
    python -m examples.grpo.train --seed 0 --out out/grpo/shuffled-0 --shuffle-advantages
    ...
    python -m examples.grpo.plot out/grpo

With --ablations it also learns from either modality's reward alone, and strictly on policy. The cluster is its own, as the
demo's is, and is stopped again whatever happens. A run that is whole in the folder is not done again, and one that has a
checkpoint goes on from there; nothing is removed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from demo import LOG_NAME, ROOT, Failed, catch_interrupts, running, served

RUN_DEADLINE_S = 1800.0
"""Long, for a busy machine: a run takes a few minutes on two cores."""

KINDS: dict[str, list[str]] = {"seed": [], "shuffled": ["--shuffle-advantages"]}
ABLATIONS: dict[str, list[str]] = {
    "audio-weight-0": ["--audio-weight", "0"],
    "video-weight-0": ["--video-weight", "0"],
    "on-policy": ["--on-policy"],
}


def main() -> int:
    catch_interrupts()
    sys.path.insert(0, str(ROOT))  # for this project's modules, which are not installed
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/grpo"), help="folder for the runs (default: out/grpo)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--ablations", action="store_true", help="also one modality alone, and on policy")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    kinds = KINDS | (ABLATIONS if args.ablations else {})
    wanted = {
        f"{name}-{seed}": ["--seed", str(seed), *how] for seed in args.seeds for name, how in kinds.items()
    }
    # Ray's sockets lie in its folder, and the path of a socket is short (107 bytes on Linux): not below TMPDIR.
    home = Path(tempfile.mkdtemp(prefix="ltx-grpo-", dir="/tmp"))
    try:
        run(home, out, wanted, args.iterations)
    except KeyboardInterrupt:
        print("\nstopped")
        return 130
    except Failed as failure:
        print(f"\n{failure}\n{out / LOG_NAME} and the run's own folder may say more", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return 0


def run(home: Path, out: Path, wanted: dict[str, list[str]], iterations: int) -> None:
    """All runs, one after the other, with all temporary files in ``home``."""
    from examples.grpo.plot import draw

    with served(home, out) as (address, environment):
        for name, how in wanted.items():
            if is_whole(out / name, iterations):
                print(f"\n{name} is there already")
                continue
            what = [
                "-m",
                "examples.grpo.train",
                *how,
                *(["--resume"] if (out / name / "checkpoint.pt").exists() else []),
                "--iterations",
                str(iterations),
                "--out",
                str(out / name),
            ]
            print(f"\n$ python {' '.join(what)}", flush=True)
            started = time.monotonic()
            with running([sys.executable, *what, "--address", address], environment) as trainer:
                try:
                    code = trainer.wait(RUN_DEADLINE_S)
                except subprocess.TimeoutExpired:
                    raise Failed(f"the run {name} was not done after {RUN_DEADLINE_S:.0f} s") from None
                if code:
                    raise Failed(f"the run {name} ended with exit code {code}")
            print(f"{name}: {time.monotonic() - started:.0f} s")
    draw(out)


def is_whole(folder: Path, iterations: int) -> bool:
    history = folder / "history.jsonl"
    lines = history.read_text().splitlines() if history.exists() else []
    return (
        bool(lines) and json.loads(lines[-1])["iteration"] >= iterations and any(folder.glob("after-*.mp4"))
    )


if __name__ == "__main__":
    sys.exit(main())
