"""The token comes from the environment, and goes to the app alone."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.cli.__main__ import main
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
