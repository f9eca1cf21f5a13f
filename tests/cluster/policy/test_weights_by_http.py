"""SGLang's weight routes over a real fleet."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
from apps import READY_S
from fastapi import FastAPI
from learning import Learning

from deployments.sglang.api import sglang_router
from deployments.weights.controls import WeightControls
from tests.weights import fresh, moved


def test_weights_from_disk_are_sampled_from(learning: Learning, tmp_path: Path) -> None:
    transformer = fresh()
    transformer.load_state_dict(moved(transformer, seed=11))
    transformer.save_pretrained(tmp_path / "step-1" / "transformer")
    app = FastAPI()
    no_archive: Any = None
    controls = WeightControls(learning.name)
    app.include_router(sglang_router(no_archive, controls, max_num_samples=1, weights_root=str(tmp_path)))

    async def post(path: str, body: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://app", timeout=READY_S) as http:
            return await http.post(path, json=body)

    version = learning.next_version()
    published = asyncio.run(post("/update_weights_from_disk", {"model_path": "step-1"}))
    assert published.status_code == 200 and published.json()["policy_version"] == version
    digest = published.json()["weights_digest"]
    assert learning.versions() == {(version, digest)}
    checksums = asyncio.run(post("/get_weights_checksum", {"module_names": ["transformer", "vae"]}))
    assert checksums.json() == {"transformer": digest, "vae": "not_found"}
