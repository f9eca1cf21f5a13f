"""Weights by SGLang's routes: published from under the root and from nowhere else, and refused in that server's form."""

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import Problem
from tests.sglang_apps import DIGEST, FakeWeights, post, saved


@pytest.mark.parametrize("form", ["a checkpoint", "its transformer", "a file", "relative", "shards"])
def test_weights_are_published_from_a_folder_under_the_root(tmp_path: Path, form: str) -> None:
    root = tmp_path / "weights"
    folder = saved(root / "step-400" / "transformer")
    if form == "shards":
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "diffusion_pytorch_model.safetensors"}})
        )
    given, expected = {
        "a checkpoint": (folder.parent, folder),
        "its transformer": (folder, folder),
        "a file": (folder / "diffusion_pytorch_model.safetensors",) * 2,
        "relative": (Path("step-400"), folder),
        "shards": (folder, folder),
    }[form]
    weights = FakeWeights()
    body = {"model_path": str(given), "flush_cache": True, "target_modules": ["transformer"]}
    answer = post("/update_weights_from_disk", body, weights=weights, root=root)
    assert answer.status_code == 200
    assert weights.published == [(4, expected)]
    assert answer.json()["success"] is True and "2 replicas" in answer.json()["message"]
    assert (answer.json()["policy_version"], answer.json()["weights_digest"]) == (4, DIGEST)


def test_the_next_version_may_be_named(tmp_path: Path) -> None:
    weights = FakeWeights()
    body = {"model_path": str(saved(tmp_path / "w")), "version": 9}
    assert (
        post("/update_weights_from_disk", body, weights=weights, root=tmp_path).json()["policy_version"] == 9
    )


def test_no_path_leads_out_of_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "weights", saved(tmp_path / "outside")
    root.mkdir()
    (root / "link").symlink_to(outside)
    saved(root / "linked file")
    (root / "linked file" / "other.safetensors").symlink_to(outside / "diffusion_pytorch_model.safetensors")
    (root / "checkpoint").mkdir()
    (root / "checkpoint" / "transformer").symlink_to(outside)
    saved(root / "indexed")
    (root / "indexed" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../../outside/diffusion_pytorch_model.safetensors"}})
    )
    (root / "circle").symlink_to(root / "circle")
    weights = FakeWeights()
    for path in (
        str(outside),
        "../outside",
        str(root / ".." / "outside"),
        "/etc/passwd",
        "/nowhere",
        "link",
        "linked file",
        "checkpoint",
        "indexed",
        "circle",
        f"{root}-sibling",
    ):
        answer = post("/update_weights_from_disk", {"model_path": path}, weights=weights, root=root)
        assert answer.status_code == 400, path
        assert "http.weights_root" in answer.json()["rule"] and answer.json()["field"] == "model_path", path
    assert weights.published == []


def test_links_within_the_root_are_followed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "blobs")
    (tmp_path / "latest").symlink_to(folder)
    weights = FakeWeights()
    assert post(
        "/update_weights_from_disk", {"model_path": "latest"}, weights=weights, root=tmp_path
    ).is_success
    assert weights.published[0][1] == folder


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({}, "model_path", "required"),
        ({"model_path": ""}, "model_path", "at least 1"),
        ({"model_path": "a\0b"}, "model_path", "NUL"),
        ({"model_path": "nothing here"}, "model_path", ".safetensors file"),
        ({"model_path": "empty"}, "model_path", ".safetensors file"),
        ({"model_path": "bad index"}, "model_path", "index"),
        ({"model_path": "w", "target_modules": ["vae"]}, "target_modules", "only the policy"),
        ({"model_path": "w", "target_module": ["vae"]}, "target_module", "did you mean target_modules"),
        ({"model_path": "w", "version": 0}, "version", "at least 1"),
        (b"{", "body", "JSON"),
    ],
)
def test_what_cannot_be_published_is_told_in_that_servers_form(
    tmp_path: Path, body: Any, field: str, said: str
) -> None:
    saved(tmp_path / "w")
    (tmp_path / "empty").mkdir()
    (saved(tmp_path / "bad index") / "model.safetensors.index.json").write_text("[]")
    weights = FakeWeights()
    answer = post("/update_weights_from_disk", body, weights=weights, root=tmp_path)
    assert answer.status_code == 400 and weights.published == []
    told = answer.json()
    assert told["success"] is False and told["field"] == field and said in told["message"]


def test_without_a_root_no_path_is_read(tmp_path: Path) -> None:
    answer = post("/update_weights_from_disk", {"model_path": str(saved(tmp_path / "w"))})
    assert answer.status_code == 400 and "http.weights_root" in answer.json()["remedy"]


@pytest.mark.parametrize(
    ("error", "status", "field"),
    [
        (Problem(code="weights_refused", field="path", rule="must be whole").exception(), 400, "model_path"),
        (Problem(code="deadline_exceeded", rule="was not done in time").exception(), 504, None),
        (OSError("disk on fire"), 500, None),
    ],
)
def test_a_publication_that_fails_is_told_in_that_servers_form(
    tmp_path: Path, error: Exception, status: int, field: str | None
) -> None:
    weights = FakeWeights()
    weights.error = error
    body = {"model_path": str(saved(tmp_path / "w"))}
    answer = post("/update_weights_from_disk", body, weights=weights, root=tmp_path)
    assert answer.status_code == status
    assert answer.json()["success"] is False and answer.json()["field"] == field
    assert "fire" not in answer.text


@pytest.mark.parametrize("route", ["update_weights_from_tensor", "update_weights_from_tensor_checker"])
def test_tensors_over_http_are_refused_with_the_way_that_works(route: str) -> None:
    answer = post(f"/{route}", {"serialized_named_tensors": ["..."]})
    assert answer.status_code == 501
    assert answer.json()["success"] is False and "publish_weights" in answer.json()["remedy"]
