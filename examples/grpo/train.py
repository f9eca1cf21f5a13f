"""Trains a LoRA of the app's transformer with GRPO, on rewards for its pictures and its sound.

    serve run serve_config.yaml                                     # in a shell of its own
    python -m examples.grpo.train --out out/grpo --iterations 40    # from the repository's root
    python -m examples.grpo.train --out out/grpo --iterations 80 --resume
    tensorboard --logdir out/grpo

Copy the folder, name rewards of your own (`--video-reward my.module:function`), and go on from there.
"""

import json
import sys
from dataclasses import asdict
from math import nan
from pathlib import Path
from typing import Annotated

import ray
import torch
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from tyro.conf import arg

import schemas

from .policy import Row
from .settings import Settings
from .trainer import Trainer

REPOSITORY = Path(schemas.__file__).resolve().parents[1]

COLUMNS = {
    "iteration": "{:>5.0f}",
    "reward_video": "{:>13.4f}",
    "reward_audio": "{:>13.3f}",
    "off_video": "{:>10.6f}",
    "off_audio": "{:>10.6f}",
    "clipped_video": "{:>14.1%}",
    "clipped_audio": "{:>14.1%}",
    "staleness": "{:>10.0f}",
    "left_out": "{:>9.0f}",
    "wait_s": "{:>8.2f}",
    "learn_s": "{:>8.2f}",
    "publish_s": "{:>10.2f}",
}


def train(settings: Settings, out: Path, app: str = "default", *, resume: bool = False) -> list[Row]:
    """One run, shown on screen and written to `out`: history.jsonl, TensorBoard's events, a checkpoint, clips."""
    before = begin(out, resume=resume)
    (out / "settings.json").write_text(json.dumps(asdict(settings), indent=2))
    num_gpus = int(settings.device.startswith("cuda"))
    actor = ray.remote(num_cpus=0, num_gpus=num_gpus)(Trainer)
    trainer = actor.remote(settings, str(out.resolve()), app, resume)
    if not resume:
        ray.get(trainer.clips.remote("before"))
    rows: list[Row] = []
    with (
        SummaryWriter(str(out), purge_step=len(before) + 1) as board,
        (out / "history.jsonl").open("a") as history,
        tqdm(total=settings.iterations, unit="iteration", dynamic_ncols=True) as bar,
    ):
        bar.write("  ".join(name.rjust(len(form.format(0))) for name, form in COLUMNS.items()))
        for ref in trainer.run.options(num_returns="streaming").remote():
            row = ray.get(ref)
            rows.append(row)
            bar.update(row["iteration"] - bar.n)
            bar.write(
                "  ".join(form.format(row.get(name, nan)).rjust(len(name)) for name, form in COLUMNS.items())
            )
            history.write(json.dumps(row) + "\n")
            history.flush()
            for name, value in row.items():
                board.add_scalar(name, value, row["iteration"])
    ray.get(trainer.clips.remote("after"))
    ray.kill(trainer)
    return rows


def begin(out: Path, *, resume: bool) -> list[str]:
    """Make the folder ready; returns the lines of history that a resumed run goes on from.

    Raises ValueError where a run is there and is not to be resumed, and where none is.
    """
    checkpoint, history = out / "checkpoint.pt", out / "history.jsonl"
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, got the file {out}")
    if resume and not checkpoint.exists():
        raise ValueError(
            f"resume needs a checkpoint, and there is no {checkpoint}; leave --resume out to begin"
        )
    is_used = checkpoint.exists() or (history.exists() and history.stat().st_size > 0)
    if is_used and not resume:
        raise ValueError(
            f"out must be a new folder, and {out} holds a run; go on with --resume, or name another"
        )
    out.mkdir(parents=True, exist_ok=True)
    updates = torch.load(checkpoint, map_location="cpu", weights_only=True)["updates"] if resume else 0
    lines = history.read_text().splitlines(keepends=True) if history.exists() else []
    kept = [line for line in lines if json.loads(line)["iteration"] <= updates]
    history.write_text("".join(kept))
    return kept


def main(
    settings: Annotated[Settings, arg(name="")],
    *,
    address: str = "auto",
    app: str = "default",
    out: Path = Path("out/grpo"),
    resume: bool = False,
) -> None:
    """Train a LoRA of the app's transformer with GRPO, on rewards for its pictures and its sound.

    Args:
        settings: what the run is made of.
        address: of the Ray cluster, host:port; "auto" is RAY_ADDRESS, or the one on this machine.
        app: name of the Serve application.
        out: folder for all that is written.
        resume: go on from the checkpoint in the folder.
    """
    # The repository travels to the actors, so that they find everything on any node.
    ray.init(
        address, runtime_env={"working_dir": str(REPOSITORY)}, log_to_driver=False, logging_level="ERROR"
    )
    train(settings, out, app, resume=resume)


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except ValueError as wrong:  # pydantic's, too, and what a Trainer refused
        sys.exit(str(wrong))
