"""Mistakes on the command line: whose they are said to be, and that a machine is always told in one JSON object."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.cli.__main__ import main
from tests.cli.serving import Archive, app_of, canned, files_in, interrupted, served

SECRET = "s3cret-of-mine"


def the_object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_a_group_that_failed_in_part_is_one_object_with_its_error(
    url: str, tmp_path: Path, capsys: Any
) -> None:
    command = ["rollout", "partly", "--group", "3", "--out", str(tmp_path), "--url", url, "--json"]
    assert main(command) == 1
    told = the_object(capsys.readouterr().out)
    assert told["num_failed"] == 1 and [sample["sample_index"] for sample in told["samples"]] == [0, 2]
    assert told["error"]["code"] == "non_finite" and "1 samples failed" in told["error"]["message"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--num-frames", "120"], "num_frames must be 8k + 1, got 120; use 113 or 121"),
        (["--request", '{"num_step": 3}'], "num_step is not a known field"),
        (["--request", "{"], "--request cannot be read"),
        (["--request", "[1]"], "must be a JSON object"),
        (["--request", "@nowhere.json"], "nowhere.json"),
        (["--request", '{"num_samples": 4}'], "--request cannot set num_samples"),
        (["--group", "99"], "num_samples must be at most 8 over HTTP"),
        (["--group", "0"], "num_samples must be at least 1"),
    ],
)
def test_what_cannot_be_asked_is_told_in_one_line(
    url: str, tmp_path: Path, capsys: Any, options: list[str], said: str
) -> None:
    assert main(["rollout", "a red ball", "--out", str(tmp_path / "run"), "--url", url, *options]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.startswith("error: ") and err.count("\n") == 1 and out == ""
    assert not (tmp_path / "run").exists()


def test_machines_are_told_in_json(url: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["generate", " ", "-o", str(tmp_path / "clip.mp4"), "--url", url, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "invalid_request" and error["field"] == "prompt" and error["remedy"]
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://host", "http://", "http://a:b:c"])
def test_what_is_no_address_is_told(address: str, capsys: Any) -> None:
    assert main(["status", "--url", address]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["paint"], ["rollout", "a"], ["generate", "a", "-o", "x", "--seed", "red"]]
)
def test_a_wrong_command_line_is_usage(argv: list[str], capsys: Any) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage:") and "\nerror: " in err


@pytest.mark.parametrize(
    "argv",
    [
        ["--json"],
        ["status", "--json", "--nope"],
        ["rollout", "a", "--json"],
        ["generate", "a", "--json", "--seed", "x"],
    ],
)
def test_a_wrong_command_line_is_one_object(argv: list[str], capsys: Any) -> None:
    assert main(argv) == 2
    assert the_object(capsys.readouterr().out)["error"]["message"]


def test_ctrl_c_is_one_object(tmp_path: Path) -> None:
    archive = Archive()
    with served(app_of(archive)) as address:
        process = interrupted(archive, "rollout", "late", "--out", str(tmp_path), "--url", address, "--json")
    assert process.returncode == 130, process.stderr
    assert "stopped" in the_object(process.stdout)["error"]["message"]
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize(
    "options",
    [
        ["--frame-rate", "nan"],
        ["--deadline-s", "inf"],
        ["--request", '{"frame_rate": NaN}'],
        ["--request", '{"metadata": {"a": [Infinity]}}'],
        ["--request", "[" * 100_000],
        ["--request", '{"metadata":' + '{"a":' * 900 + "1" + "}" * 901],
        ["--request", '{"seed": "\\ud800"}'],
        ["--negative-prompt", "\udcff"],
    ],
)
def test_what_cannot_be_sent_is_the_callers_mistake(
    url: str, tmp_path: Path, capsys: Any, options: list[str]
) -> None:
    assert main(["generate", "x", "-o", str(tmp_path / "clip.mp4"), "--url", url, *options, "--json"]) == 2
    message = the_object(capsys.readouterr().out)["error"]["message"]
    assert "release" not in message and files_in(tmp_path) == set()


@pytest.mark.parametrize("token", [f"{SECRET}\nx", f"{SECRET}\x01", f"{SECRET}é", f"{SECRET}\udcff"])
def test_a_token_that_cannot_be_sent_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, token: str
) -> None:
    monkeypatch.setenv("LTX_ROLLOUT_TOKEN", token)
    assert main(["status"]) == 2
    out, err = capsys.readouterr()
    assert "LTX_ROLLOUT_TOKEN must be" in err and SECRET not in out + err


@pytest.mark.parametrize("command", ["weights", "status"])
@pytest.mark.parametrize("answer", [[], {}, 5, False, "x", {"control": 5}, {"control": {"version": 3}}])
def test_an_answer_of_something_else_is_none(command: str, answer: Any, capsys: Any) -> None:
    assert main([command, "--json"], canned(httpx.Response(200, json=answer))) == 1
    assert "another release" in the_object(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize(
    "manifest",
    [
        b"\xff",
        b"[]",
        b"5",
        b"[" * 100_000,
        b'{"files": {"samples": [1]}, "request": {"prompt": 1}, "samples": []}',
        b'{"files": {"samples": []}, "request": {"prompt": "x"}, "samples": [{}]}',
        b'{"files": {"samples": []}, "request": {"prompt": "x", "seed": 1, "num_inference_steps": 1}, "samples": [{"timings": 5}]}',
        b'{"files": {"samples": [{"trajectory": "sample-0.arrows"}]}, "request": {}, "samples": []}',
    ],
)
def test_a_damaged_run_is_told_as_such(tmp_path: Path, manifest: bytes, capsys: Any) -> None:
    (tmp_path / "manifest.json").write_bytes(manifest)
    (tmp_path / "sample-0.arrows").write_bytes(b"garbage" * 99)
    assert main(["inspect", str(tmp_path), "--no-png", "--json"]) == 2
    message = the_object(capsys.readouterr().out)["error"]["message"]
    assert "cannot be read" in message and "release" not in message


def test_a_file_is_no_folder(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    assert main(["inspect", str(tmp_path / "file")]) == 2
    assert "manifest.json is not there" in capsys.readouterr().err
