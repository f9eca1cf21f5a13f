"""Clips and groups from the command line: what is asked for, what comes, and what is told meanwhile."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from deployments.cli.__main__ import main
from schemas.arrow import manifest_of
from schemas.resolved import ResolvedRequest
from schemas.trajectory import read_trajectory
from tests.cli.serving import Archive, files_in
from tests.fake_archive import trajectory_of


def table_of(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all()


def test_a_clip_is_made_of_a_prompt(url: str, archive: Archive, tmp_path: Path, capsys: Any) -> None:
    clip = tmp_path / "new" / "clip.mp4"
    assert main(["generate", "a red ball", "-o", str(clip), "--url", url, "--seed", "7"]) == 0
    assert clip.read_bytes()[4:8] == b"ftyp" and files_in(clip.parent) == {"clip.mp4"}
    assert (archive.asked["mode"], archive.asked["trajectory"], archive.asked["seed"]) == (
        "generate",
        False,
        7,
    )
    out, err = capsys.readouterr()
    assert str(clip) in out and "seed 7" in out and err == ""


def test_a_group_is_written_as_arrow_files_and_a_manifest(
    url: str, archive: Archive, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    command = ["rollout", "a red ball", "--group", "3", "--out", str(run), "--url", url, "--media", "--json"]
    options = ["--seed", "7", "--num-inference-steps", "5", "--frame-rate", "25"]
    assert main([*command, *options, "--request", '{"state_dtype": "float32", "return_steps": "all"}']) == 0
    assert archive.asked["num_samples"] == 3 and archive.asked["return_steps"] == "all"
    assert archive.asked["frame_rate"] == 25
    names = [f"sample-{index}.{kind}" for index in range(3) for kind in ("arrows", "mp4")]
    assert files_in(run) == {"manifest.json", "conditioning.arrows", *names}

    told = json.loads(capsys.readouterr().out)
    assert told["num_failed"] == 0 and told["folder"] == str(run)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["request_id"] == told["request_id"] and manifest["request"]["seed"] == 7
    for sample in manifest["files"]["samples"]:
        table = table_of(run / sample["trajectory"])
        assert manifest_of(table)["sample_index"] == sample["sample_index"]
        expected = trajectory_of(ResolvedRequest.model_validate(manifest["request"]), sample["sample_index"])
        assert table.equals(expected, check_metadata=True)
        assert read_trajectory(table).steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert table_of(run / manifest["files"]["conditioning"]).num_rows == 1


def test_without_media_no_pictures_are_made(url: str, archive: Archive, tmp_path: Path) -> None:
    assert main(["rollout", "a red ball", "--out", str(tmp_path), "--url", url]) == 0
    assert archive.asked["media"] is False
    assert files_in(tmp_path) == {"manifest.json", "conditioning.arrows", "sample-0.arrows"}


def test_a_group_with_a_failed_sample_is_kept_and_told(url: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["rollout", "partly", "--group", "3", "--out", str(tmp_path), "--url", url]) == 1
    assert files_in(tmp_path) == {
        "manifest.json",
        "conditioning.arrows",
        "sample-0.arrows",
        "sample-2.arrows",
    }
    assert "1 samples failed" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--no-png"]) == 0
    assert "non_finite" in capsys.readouterr().out


def test_steps_are_shown_where_somebody_can_see_them(
    url: str, archive: Archive, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert (
        main(["rollout", "a red ball", "--group", "2", "--seed", "7", "--out", str(tmp_path), "--url", url])
        == 0
    )
    err = capsys.readouterr().err
    assert "2 samples, seed 7:" in err and "0/12" in err
