"""The token comes from the environment, and goes to the app alone."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.cli.__main__ import main
from deployments.cli.http import DONE, FAILED
from tests.cli.serving import Archive, app_of, served


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


@pytest.mark.parametrize(
    ("link", "code"),
    [
        ("/mine/a.mp4", DONE),
        ("//evil.example/a", DONE),
        ("http://evil.example/a", FAILED),
        ("@evil.example/a", FAILED),
        (".evil.example/a", FAILED),
    ],
)
def test_the_token_never_leaves_the_app_whatever_a_link_says(
    link: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that begins with a slash is a path of the app, and any other is not followed."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if request.method == "GET":
            return httpx.Response(200, content=b"a film")
        sample = {"problem": None, "links": {"mp4": link}, "seed": 7, "policy_version": 0}
        summary = {"request_id": "mine", "samples": [sample]}
        return httpx.Response(200, text=f"event: summary\ndata: {json.dumps(summary)}\n\n")

    monkeypatch.setenv("LTX_ROLLOUT_TOKEN", "secret")
    clip = tmp_path / "a.mp4"
    command = ["generate", "a", "-o", str(clip), "--url", "http://app:8000"]
    assert main(command, httpx.MockTransport(answer)) == code
    followed = [link] if code == DONE else []
    assert [request.url.raw_path.decode() for request in asked] == ["/v1/rollouts", *followed]
    assert {(request.url.host, request.url.port) for request in asked} == {("app", 8000)}
    assert {request.headers["authorization"] for request in asked} == {"Bearer secret"}
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"a film"] * len(followed)
