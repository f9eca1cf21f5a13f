"""What a run of examples/grpo is made of: its arguments, what it must not be, its code and its folder."""

import importlib
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from pydantic import ValidationError

from examples.grpo import train
from examples.grpo.checks import check_app
from examples.grpo.settings import Settings
from pipeline.noise import MODALITIES
from schemas.card import ModelCard


def given(*words: str) -> Settings:
    """The settings that train.py makes of its arguments."""
    return tyro.cli(Settings, args=words)


def test_every_setting_is_an_argument_and_keeps_its_default() -> None:
    assert given() == Settings()
    words = ["--on-policy", "--seed", "3", "--prompts", "a, b", "c", "--request", '{"height": 64}']
    assert given(*words, "--max-rows", "2") == Settings(
        on_policy=True, seed=3, prompts=("a, b", "c"), request={"height": 64}, max_rows=2
    )


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("group_size", 1, "greater than or equal to 2"),
        ("prompts", (), "at least 1 item"),
        ("audio_weight", -1.0, "greater than or equal to 0"),
        ("clip_range", math.nan, "greater than 0"),
        ("log_prob_kind", "mean", "'density' or 'squared_error'"),
        ("video_reward", "blueness", "redness, loudness or .*, got 'blueness'"),
        ("video_reward", "no.such:thing", "redness, loudness or .*, got 'no.such:thing'"),
        ("audio_reward", "math:pi", "redness, loudness or .*, got 'math:pi'"),
        ("audio_reward", "math:nothing", "redness, loudness or .*, got 'math:nothing'"),
        ("request", {"seed": 3}, "request.seed is the trainer's to set, got 3; leave it out"),
        ("request", {"media": False}, "request.media is the trainer's to set"),
        ("max_staleness", 0, "must be at least 1, got 0; for none, use on_policy"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(field: str, value: object, rule: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){field}.*{rule}"):
        Settings(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"model": "small"}, "model must be what the app serves, 'tiny', got 'small'"),
        ({"request": {"heigth": 64}}, "did you mean height"),
        ({"prompts": ("a red ball", "")}, '"field": "prompt"'),
        ({"request": {"transition": {m: {"kind": "ode"} for m in MODALITIES}}}, "must be stochastic"),
        ({"request": {"transition": {"video": {"kind": "ode"}}}, "audio_weight": 0.0}, "must be stochastic"),
        ({"log_prob_kind": "squared_error"}, "log_prob_kind must be that of request.transition, 'density'"),
    ],
)
def test_what_the_app_cannot_give_is_refused_before_anything_is_sampled(
    settings: dict[str, Any], rule: str, card: ModelCard
) -> None:
    check_app(Settings(), card)
    with pytest.raises(ValueError, match=rule):
        check_app(Settings(**settings), card)


def test_a_copy_of_the_example_runs_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(train.__file__).parent, tmp_path / "my_grpo")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("my_grpo.train")
    assert mine.REPOSITORY == train.REPOSITORY
    for name in ("Settings", "Trainer"):
        assert getattr(mine, name).__module__.startswith("my_grpo.")
    assert sys.modules["my_grpo.policy"].clipped_loss.__module__ == "my_grpo.loss"


def test_a_folder_is_begun_once_and_resumed_where_its_checkpoint_is(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"resume needs a checkpoint, and there is no .*checkpoint\.pt"):
        train.begin(out, resume=True)
    assert train.begin(out, resume=False) == []
    assert train.begin(out, resume=False) == [], "of the first, nothing came"
    lines = [json.dumps({"iteration": number}) + "\n" for number in (1, 2, 3)]
    (out / "history.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match="holds a run; go on with --resume"):
        train.begin(out, resume=False)
    torch.save({"updates": 2}, out / "checkpoint.pt")
    assert train.begin(out, resume=True) == lines[:2]
    assert (out / "history.jsonl").read_text() == "".join(lines[:2])
    with pytest.raises(ValueError, match="out must be a folder, got the file"):
        train.begin(out / "history.jsonl", resume=False)
