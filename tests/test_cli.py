"""The command line against an app behind a real HTTP server, with an archive that needs no cluster."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
import uvicorn
from fake_archive import FakeArchive, trajectory_of
from fastapi import FastAPI
from PIL import Image

from configs.settings import HttpSettings
from deployments.cli.__main__ import main
from deployments.http.api import http_app
from deployments.kept.api import Submitted
from schemas.arrow import manifest_of
from schemas.control import Control, Fleet, ReplicaState
from schemas.resolved import ResolvedRequest
from schemas.trajectory import read_trajectory

ROOT = Path(__file__).parents[1]
FLEET = Fleet(
    control=Control(version=3),
    replicas=(
        ReplicaState(replica_id="denoiser-0", version=3, weights_digest="ab" * 16, run="running"),
        ReplicaState(replica_id="denoiser-1", version=2, weights_digest="cd" * 16, run="running"),
    ),
    kept_versions=(2, 3),
)


class Archive(FakeArchive):
    """Remembers what it was asked for."""

    asked: dict[str, Any]

    async def submit(self, request: dict[str, Any], *, from_http: bool = True) -> Submitted:
        self.asked = request
        return await super().submit(request, from_http=from_http)


def app_of(archive: Archive, **settings: Any) -> FastAPI:
    async def fleet() -> Fleet:
        return FLEET

    return http_app(archive, fleet, checkpoint="tiny", settings=HttpSettings(**settings))


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of an app behind uvicorn."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def archive() -> Archive:
    return Archive(keep_bytes=2**40)


@pytest.fixture(scope="module")
def url(archive: Archive) -> Iterator[str]:
    with served(app_of(archive)) as address:
        yield address


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def table_of(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all()


def canned(answer: httpx.Response) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: answer)


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


def test_what_is_there_is_not_overwritten_unless_asked(url: str, tmp_path: Path, capsys: Any) -> None:
    run = ["rollout", "a red ball", "--out", str(tmp_path), "--url", url]
    assert main([*run, "--group", "2"]) == 0
    assert main(run) == 2 and "--force" in capsys.readouterr().err
    assert main([*run, "--force"]) == 0
    assert files_in(tmp_path) == {"manifest.json", "conditioning.arrows", "sample-0.arrows"}
    clip = tmp_path / "clip.mp4"
    clip.write_text("mine")
    assert main(["generate", "a", "-o", str(clip), "--url", url]) == 2 and clip.read_text() == "mine"


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


def test_machines_are_told_in_json(url: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["generate", " ", "-o", str(tmp_path / "clip.mp4"), "--url", url, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "invalid_request" and error["field"] == "prompt" and error["remedy"]
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize("command", ["generate", "rollout"])
def test_a_rollout_that_fails_leaves_nothing_behind(
    url: str, tmp_path: Path, capsys: Any, command: str
) -> None:
    place = {"generate": ["-o", str(tmp_path / "a.mp4")], "rollout": ["--out", str(tmp_path)]}[command]
    assert main([command, "fails", *place, "--url", url]) == 1
    assert "allow more" in capsys.readouterr().err and files_in(tmp_path) == set()


def test_the_fleet_is_shown(url: str, capsys: Any) -> None:
    assert main(["weights", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "policy version 3, running; kept: 2, 3" in out
    assert "denoiser-1  2        cdcdcdcdcdcd  running" in out
    assert main(["weights", "--url", url, "--json"]) == 0
    assert Fleet.model_validate_json(capsys.readouterr().out) == FLEET


def test_the_status_is_shown(url: str, capsys: Any) -> None:
    assert main(["status", "--url", f"{url}/"]) == 0
    assert "ok, checkpoint tiny, running\npolicy version 3: 1 of 2 denoisers" in capsys.readouterr().out
    assert main(["status", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_at_version"] == 1


def test_a_folder_is_shown_as_a_table_and_a_picture(url: str, tmp_path: Path, capsys: Any) -> None:
    main(["rollout", "a red ball", "--group", "2", "--out", str(tmp_path), "--url", url, "--seed", "7"])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "'a red ball', seed 7, 6 steps"
    assert out[1].split()[:3] == ["sample", "version", "states"] and out[-1] == str(
        tmp_path / "log-probs.png"
    )
    assert out[2].split()[:5] == ["0", "3", "7", "-3.5000", "-3.5000"] and out[3].split()[3] == "-4.5000"
    with Image.open(tmp_path / "log-probs.png") as picture:
        assert picture.format == "PNG"
    assert main(["inspect", str(tmp_path), "--json", "--no-png"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [sample["num_states"] for sample in told["samples"]] == [7, 7] and told["picture"] is None


def test_what_is_no_folder_of_a_rollout_is_told(tmp_path: Path, capsys: Any) -> None:
    assert main(["inspect", str(tmp_path)]) == 2 and "manifest.json is not there" in capsys.readouterr().err
    (tmp_path / "manifest.json").write_text("{")
    assert main(["inspect", str(tmp_path)]) == 2 and "cannot be read" in capsys.readouterr().err


def test_a_file_that_was_cut_short_is_told(url: str, tmp_path: Path, capsys: Any) -> None:
    main(["rollout", "a red ball", "--out", str(tmp_path), "--url", url])
    path = tmp_path / "sample-0.arrows"
    path.write_bytes(path.read_bytes()[:-500])
    assert main(["inspect", str(tmp_path), "--no-png"]) == 2
    assert "sample-0.arrows cannot be read" in capsys.readouterr().err


def test_a_download_that_breaks_leaves_no_part(tmp_path: Path, capsys: Any) -> None:
    """The server says more bytes than it sends."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            sample = {"problem": None, "links": {"mp4": "/clip.mp4"}, "seed": 7, "policy_version": 0}
            summary = {"request_id": "mine", "samples": [sample]}
            return httpx.Response(200, text=f"event: summary\ndata: {json.dumps(summary)}\n\n")

        def broken() -> Iterator[bytes]:
            yield b"half"
            raise httpx.RemoteProtocolError("peer closed connection")

        return httpx.Response(200, content=broken())

    clip = tmp_path / "clip.mp4"
    assert main(["generate", "a", "-o", str(clip)], httpx.MockTransport(answer)) == 1
    assert "broke: peer closed connection" in capsys.readouterr().err and files_in(tmp_path) == set()


def test_a_stream_that_ends_early_is_a_failure(tmp_path: Path, capsys: Any) -> None:
    stream = 'event: started\ndata: {"request": {"num_samples": 1, "num_inference_steps": 6, "seed": 1}}\n\n'
    transport = canned(httpx.Response(200, text=stream))
    assert main(["rollout", "a", "--out", str(tmp_path)], transport) == 1
    assert "before the rollout was done" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (httpx.Response(404, text="Path '/health' not found."), 3, "not this app"),
        (httpx.Response(200, text="<html>"), 3, "not this app"),
        (httpx.Response(502, text="Bad Gateway"), 1, "answered 502"),
        (httpx.Response(200, json={"unexpected": 1}), 1, "another release"),
        (
            httpx.Response(503, json={"code": "halted", "rule": "is asleep", "detail": "it is asleep"}),
            1,
            "asleep",
        ),
    ],
)
def test_answers_of_others_are_told_in_words(
    answer: httpx.Response, code: int, said: str, capsys: Any
) -> None:
    assert main(["status"], canned(answer)) == code
    assert said in capsys.readouterr().err


def test_where_no_app_is_the_address_is_told(capsys: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for command in (["status"], ["weights"], ["generate", "a", "-o", str(tmp_path / "a.mp4")]):
        assert main([*command, "--url", address]) == 3
        err = capsys.readouterr().err
        assert address in err and "serve run" in err


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://host", "http://", "http://a:b:c"])
def test_what_is_no_address_is_told(address: str, capsys: Any) -> None:
    assert main(["status", "--url", address]) == 2
    assert "--url" in capsys.readouterr().err


def test_the_token_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("APP_TOKEN", "secret")
    with served(app_of(Archive(), token_env="APP_TOKEN")) as address:
        assert main(["status", "--url", address]) == 2
        assert "Authorization" in capsys.readouterr().err
        monkeypatch.setenv("LTX_ROLLOUT_TOKEN", "secret")
        assert main(["status", "--url", address]) == 0
        assert main(["generate", "a", "-o", str(tmp_path / "a.mp4"), "--url", address]) == 0


def test_the_token_never_leaves_the_app_whatever_a_link_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[httpx.URL] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url)
        sample = {"problem": None, "links": {"mp4": "//evil.example/a"}, "seed": 7, "policy_version": 0}
        summary = {"request_id": "mine", "samples": [sample]}
        return httpx.Response(200, text=f"event: summary\ndata: {json.dumps(summary)}\n\n")

    monkeypatch.setenv("LTX_ROLLOUT_TOKEN", "secret")
    main(["generate", "a", "-o", str(tmp_path / "a.mp4")], httpx.MockTransport(answer))
    assert {url.host for url in asked} == {"127.0.0.1"}


@pytest.mark.parametrize(
    "argv", [[], ["paint"], ["rollout", "a"], ["generate", "a", "-o", "x", "--seed", "red"]]
)
def test_a_wrong_command_line_is_usage(argv: list[str], capsys: Any) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage:") and "\nerror: " in err


def as_from_a_terminal() -> None:
    """A shell's background jobs, as these tests may be, ignore Ctrl-C, and what they start inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_hangs_up_and_says_so(tmp_path: Path) -> None:
    archive = Archive()
    with served(app_of(archive)) as address:
        command = [
            sys.executable,
            "-m",
            "deployments.cli",
            "rollout",
            "late",
            "--out",
            str(tmp_path),
            "--url",
            address,
        ]
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=as_from_a_terminal
        )
        while not getattr(archive, "asked", None):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err) == (130, False), err
    assert "stopped" in err
    assert files_in(tmp_path) == set()


def test_it_starts_without_torch_ray_and_pydantic() -> None:
    code = (
        "import sys, deployments.cli.__main__ as cli\n"
        "code = cli.main(['status', '--url', 'http://127.0.0.1:9'])\n"
        "loaded = {'torch', 'ray', 'pydantic', 'pyarrow', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "sys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL).returncode
        == 3
    )
