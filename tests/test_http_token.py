"""The token at the door: nothing but health answers without it, and an app that is to ask for one has one."""

from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from configs.settings import HttpSettings
from tests.fake_archive import FakeArchive
from tests.http_apps import BALL, ROLLOUTS, app_of, problem_of, talk


def test_without_the_token_only_health_answers(tmp_path: Path) -> None:
    place = tmp_path / "token"
    place.write_text("s3cret\n")

    async def script(http: httpx.AsyncClient, archive: FakeArchive) -> None:
        assert (await http.get("/health")).status_code == 200
        wrong: list[Mapping[str, str]] = [
            {},
            {"authorization": "Bearer s3cre"},
            {"authorization": "Basic s3cret"},
            {"authorization": "s3cret"},
        ]
        for headers in wrong:
            for method, path in (
                ("POST", ROLLOUTS),
                ("GET", "/v1/weights"),
                ("GET", "/openapi.json"),
                ("GET", "/x"),
            ):
                refused = await http.request(method, path, headers=headers)
                problem_of(refused, 401, "invalid_request")
                assert refused.headers["www-authenticate"] == "Bearer" and "s3cret" not in refused.text
        assert archive.num_sampled == 0
        answer = await http.post(ROLLOUTS, json=BALL, headers={"authorization": "bearer s3cret"})
        assert answer.status_code == 200

    talk(script, token_file=str(place))


def test_an_app_that_is_to_ask_for_a_token_does_not_start_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").write_text("\n")
    monkeypatch.delenv("LTX_TOKEN", raising=False)
    for settings in (
        {"token_env": "LTX_TOKEN"},
        {"token_file": str(tmp_path / "none")},
        {"token_file": str(tmp_path / "empty")},
    ):
        with pytest.raises(ValueError, match="must lead to a token"):
            app_of(FakeArchive(), **settings)
    monkeypatch.setenv("LTX_TOKEN", "s3cret")
    assert app_of(FakeArchive(), token_env="LTX_TOKEN")
    with pytest.raises(ValueError, match="cannot both be given"):
        HttpSettings(token_env="A", token_file="b")
