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
from pathlib import Path
from typing import Annotated

import ray
import tyro
from pydantic import ValidationError
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from tyro.conf import arg

from examples.grpo.policy import Row
from examples.grpo.settings import Settings
from examples.grpo.trainer import Trainer

REPOSITORY = Path(__file__).resolve().parents[2]

COLUMNS = {
    "iteration": "{:>5.0f}",
    "reward_video": "{:>13.4f}",
    "reward_audio": "{:>13.3f}",
    "ratio_video_max": "{:>16.6f}",
    "ratio_audio_max": "{:>16.6f}",
    "clipped_video": "{:>14.1%}",
    "clipped_audio": "{:>14.1%}",
    "staleness": "{:>10.0f}",
    "wait_s": "{:>8.2f}",
    "learn_s": "{:>8.2f}",
    "publish_s": "{:>10.2f}",
}


def train(settings: Settings, out: Path, app: str = "default", *, resume: bool = False) -> list[Row]:
    """One run, shown on screen and written to `out`: history.jsonl, TensorBoard's events, a checkpoint, clips."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "settings.json").write_text(json.dumps(asdict(settings), indent=2))
    num_gpus = int(settings.device.startswith("cuda"))
    actor = ray.remote(num_cpus=0, num_gpus=num_gpus)(Trainer)
    trainer = actor.remote(settings, str(out.resolve()), app, resume)
    if not resume:
        ray.get(trainer.clips.remote("before"))
    rows: list[Row] = []
    with (
        SummaryWriter(str(out)) as board,
        (out / "history.jsonl").open("a" if resume else "w") as history,
        tqdm(total=settings.iterations, unit="iteration", dynamic_ncols=True) as bar,
    ):
        bar.write("  ".join(name.rjust(len(form.format(0))) for name, form in COLUMNS.items()))
        for ref in trainer.run.options(num_returns="streaming").remote():
            row = ray.get(ref)
            rows.append(row)
            bar.update(row["iteration"] - bar.n)
            bar.write("  ".join(form.format(row[name]).rjust(len(name)) for name, form in COLUMNS.items()))
            history.write(json.dumps(row) + "\n")
            history.flush()
            for name, value in row.items():
                board.add_scalar(name, value, row["iteration"])
    ray.get(trainer.clips.remote("after"))
    ray.kill(trainer)
    return rows


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
    except ValidationError as wrong:
        sys.exit(str(wrong))
