"""Servers that are not there, are another's, or break off: each is told in words."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.cli.__main__ import main
from tests.cli.serving import canned, files_in, nobody


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
    with nobody() as address:
        for command in (["status"], ["weights"], ["generate", "a", "-o", str(tmp_path / "a.mp4")]):
            assert main([*command, "--url", address]) == 3
            err = capsys.readouterr().err
            assert address in err and "serve run" in err
