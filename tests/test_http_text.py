"""Text that cannot leave as UTF-8, and other bodies that nobody means: each is the caller's to mend."""

import asyncio

import httpx
import pytest

from configs.settings import HttpSettings
from deployments.http.api import http_app
from deployments.sglang.api import sglang_router
from tests.fake_archive import FakeArchive
from tests.http_apps import fleet, http_of
from tests.sglang_apps import FakeWeights

ROUTES = ("/v1/rollouts", "/rollout/generate", "/get_weights_checksum", "/update_weights_from_disk")
SURROGATES = [
    r'{"prompt": "x", "\ud800": 1}',
    r'{"prompt": "x", "image\ud800": 1}',
    r'{"prompt": "x", "image\ud800": "\ud800"}',
    r'{"prompt": "x", "extra_sampling_params": {"\ud800": 1}}',
    r'{"prompt": "x", "extra_sampling_params": {"quality": "\ud800"}}',
    r'{"prompt": "x", "mode": "\ud800"}',
    r'{"prompt": "x", "metadata": {"\ud800": 1}}',
    r'{"prompt": "x", "transition": {"video\ud800": {"\ud800": 1}}}',
    r'{"prompt": "x", "module_names": ["\ud800"], "model_path": "\ud800"}',
]
STRANGE = [
    b"[" * 200_000,
    b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}",
    b'{"prompt": "x", "seed": NaN}',
    b"\xff\xfe",
    b'{"module_names": ["\\ud800"]}',
    b'{"model_path": "' + b"a" * 300 + b'"}',
    b'{"model_path": "' + b"a/" * 3000 + b'"}',
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "body", [*(text.encode() for text in SURROGATES), *STRANGE], ids=lambda body: repr(body)[:40]
)
def test_what_nobody_means_is_the_callers_to_mend(path: str, body: bytes) -> None:
    async def send() -> httpx.Response:
        archive = FakeArchive()
        router = sglang_router(archive, FakeWeights(), max_num_samples=8, weights_root="/nowhere")
        app = http_app(archive, fleet, checkpoint="tiny", settings=HttpSettings(), routers=[router])
        async with http_of(app) as http:
            return await http.post(path, content=body, headers={"content-type": "application/json"})

    answer = asyncio.run(send())
    assert 400 <= answer.status_code < 500, answer.text
    problem = answer.json()
    assert problem["code"] == "invalid_request" and problem["rule"]
