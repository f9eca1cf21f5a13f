"""What the command line writes, where, and what it leaves alone."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.cli.__main__ import main
from tests.cli.serving import Archive, files_in

RUN = {"manifest.json", "conditioning.arrows", "sample-0.arrows"}


def sse(*samples: dict[str, Any]) -> httpx.MockTransport:
    """An app whose rollout has these samples; every file of it is the word "new"."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method != "POST":
            return httpx.Response(200, content=b"new")
        asked = {"seed": 1, "prompt": "x", "num_inference_steps": 1}
        links = {"self": "/", "conditioning": None}
        told = {"request_id": "x", "request": asked, "samples": samples, "links": links}
        return httpx.Response(200, text=f"event: summary\ndata: {json.dumps(told)}\n\n")

    return httpx.MockTransport(answer)


def sample(index: Any) -> dict[str, Any]:
    links = {"trajectory": "/x", "mp4": "/y"}
    return {"sample_index": index, "problem": None, "links": links}


def mine(folder: Path, *names: str) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(f"my {name}")
    return contents(folder)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "name", ["conditioning.arrows", "sample-0.arrows", "sample-0.mp4", "sample-7.mp4", "manifest.json"]
)
def test_a_file_that_a_rollout_could_write_is_not_touched_without_force(
    url: str, archive: Archive, tmp_path: Path, capsys: Any, name: str
) -> None:
    before, sampled = mine(tmp_path, name, "sample-cat.mp4"), archive.num_sampled
    assert main(["rollout", "a", "--out", str(tmp_path), "--url", url]) == 2
    assert name in capsys.readouterr().err
    assert contents(tmp_path) == before and archive.num_sampled == sampled


def test_what_is_there_is_not_overwritten_unless_asked(url: str, tmp_path: Path, capsys: Any) -> None:
    run = ["rollout", "a red ball", "--out", str(tmp_path), "--url", url]
    assert main([*run, "--group", "2"]) == 0
    assert main(run) == 2 and "--force" in capsys.readouterr().err
    assert main([*run, "--force"]) == 0
    assert files_in(tmp_path) == {"manifest.json", "conditioning.arrows", "sample-0.arrows"}
    clip = tmp_path / "clip.mp4"
    clip.write_text("mine")
    assert main(["generate", "a", "-o", str(clip), "--url", url]) == 2 and clip.read_text() == "mine"


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_files_of_other_names_stay(url: str, tmp_path: Path, force: list[str]) -> None:
    names = ("sample-cat.mp4", "sample-notes.arrows", "log-probs.png", "sample-1.mp4.bak")
    before = mine(tmp_path, *names)
    assert main(["rollout", "a", "--out", str(tmp_path), "--url", url, *force]) == 0
    assert files_in(tmp_path) == {*RUN, *names}
    assert {name: (tmp_path / name).read_text() for name in names} == before


def test_with_force_the_files_go_that_the_old_manifest_names_and_no_others(url: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    mine(run, "sample-1.arrows", "sample-2.arrows", "sample-3.arrows")
    outside = tmp_path / "sample-9.arrows"
    outside.write_text("mine")
    samples = [{"trajectory": name} for name in ("sample-1.arrows", "../sample-9.arrows", str(outside), 5)]
    (run / "manifest.json").write_text(json.dumps({"files": {"conditioning": None, "samples": samples}}))
    assert main(["rollout", "a", "--out", str(run), "--url", url, "--force"]) == 0
    assert files_in(run) == {*RUN, "sample-2.arrows", "sample-3.arrows"} and outside.read_text() == "mine"


@pytest.mark.parametrize("manifest", ["{}", "[]", "{", '{"files": {"conditioning": 1, "samples": [1]}}'])
def test_a_manifest_that_tells_nothing_removes_nothing(url: str, tmp_path: Path, manifest: str) -> None:
    mine(tmp_path, "sample-1.arrows")
    (tmp_path / "manifest.json").write_text(manifest)
    assert main(["rollout", "a", "--out", str(tmp_path), "--url", url, "--force"]) == 0
    assert files_in(tmp_path) == {*RUN, "sample-1.arrows"}


def test_the_old_run_stays_until_the_new_one_has_come(url: str, tmp_path: Path) -> None:
    run = ["rollout", "--out", str(tmp_path), "--url", url, "--force"]
    assert main([*run, "a", "--group", "2"]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main([*run, "fails"]) == 1

    def breaks(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return sse(sample(0)).handle_request(request)
        raise httpx.ReadError("broke")

    assert main(["rollout", "a", "--out", str(tmp_path), "--force"], httpx.MockTransport(breaks)) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("index", ["/../../escaped", "../x", 7, None])
def test_files_are_named_by_the_command_line_and_not_by_the_server(tmp_path: Path, index: Any) -> None:
    run = tmp_path / "a" / "b"
    assert main(["rollout", "x", "--out", str(run)], sse(sample(index), sample(index))) == 0
    names = {f"sample-{number}.{kind}" for number in (0, 1) for kind in ("arrows", "mp4")}
    assert files_in(run) == {*names, "manifest.json"}
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != run] == []


def test_what_is_inspected_lies_in_the_folder(tmp_path: Path, capsys: Any) -> None:
    files = {"samples": [{"trajectory": "../sample-0.arrows"}]}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": files, "request": {}, "samples": []}))
    assert main(["inspect", str(tmp_path)]) == 2
    assert "no file of a rollout" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file/clip.mp4", "file/deeper/clip.mp4", "/proc/nope/clip.mp4", "n" * 300])
@pytest.mark.parametrize("command", ["generate", "rollout"])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_sampled(
    url: str, archive: Archive, tmp_path: Path, capsys: Any, place: str, command: str
) -> None:
    (tmp_path / "file").write_text("mine")
    sampled = archive.num_sampled
    option = "-o" if command == "generate" else "--out"
    assert main([command, "x", option, str(tmp_path / place), "--url", url]) == 2
    assert "choose another place" in capsys.readouterr().err
    assert archive.num_sampled == sampled and files_in(tmp_path) == {"file"}


def test_a_name_may_be_as_long_as_names_may_be(url: str, tmp_path: Path) -> None:
    clip = tmp_path / ("n" * 251 + ".mp4")
    assert main(["generate", "x", "-o", str(clip), "--url", url]) == 0 and clip.stat().st_size > 0


@pytest.mark.parametrize("command", ["generate", "rollout"])
def test_a_rollout_that_fails_leaves_nothing_behind(
    url: str, tmp_path: Path, capsys: Any, command: str
) -> None:
    place = {"generate": ["-o", str(tmp_path / "a.mp4")], "rollout": ["--out", str(tmp_path)]}[command]
    assert main([command, "fails", *place, "--url", url]) == 1
    assert "allow more" in capsys.readouterr().err and files_in(tmp_path) == set()


def test_folders_that_were_made_for_what_did_not_come_go_again(url: str, tmp_path: Path) -> None:
    assert main(["generate", "fails", "-o", str(tmp_path / "a" / "b" / "c.mp4"), "--url", url]) == 1
    assert main(["rollout", "fails", "--out", str(tmp_path / "d" / "e"), "--url", url]) == 1
    assert files_in(tmp_path) == set()


def test_a_link_that_leads_nowhere_is_there(url: str, tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    clip.symlink_to(tmp_path / "nowhere")
    assert main(["generate", "x", "-o", str(clip), "--url", url]) == 2 and os.readlink(clip)


def test_what_is_written_has_the_rights_of_any_other_file(url: str, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    assert main(["generate", "x", "-o", str(tmp_path / "clip.mp4"), "--url", url]) == 0
    assert (tmp_path / "clip.mp4").stat().st_mode == (tmp_path / "other").stat().st_mode
