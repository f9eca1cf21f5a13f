"""Paths in requests: what is read under the root, and what is not even opened."""

import json
import os
from pathlib import Path

import pytest

from deployments.sglang.weights_root import weights_under
from schemas.errors import Problem
from tests.sglang_apps import saved

INDEX = "model.safetensors.index.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def refused(root: Path, given: str) -> Problem:
    with pytest.raises(ValueError, match="invalid_request") as caught:
        weights_under(str(root), given)
    problem = Problem.of(caught.value)
    assert problem is not None and problem.field == "model_path" and problem.remedy
    return problem


@pytest.mark.parametrize("name", [INDEX, "adapter_config.json", "b.safetensors"])
@pytest.mark.parametrize("kind", ["link outside", "dangling link", "pipe", "folder", "circle"])
def test_a_file_that_is_none_of_the_roots_is_not_opened(root: Path, name: str, kind: str) -> None:
    outside = root.parent / "outside"
    outside.write_text(json.dumps({"weight_map": {"a": WEIGHTS}}))
    file = saved(root / "w") / name
    match kind:
        case "link outside":
            file.symlink_to(outside)
        case "dangling link":
            file.symlink_to(root.parent / "nowhere")
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "circle":
            file.symlink_to(file)
    rule = refused(root, "w").rule
    assert "must lie under" in rule or f"{name} is none" in rule


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"weight_map": {"a": "\\u0000.safetensors"}}',
        '{"weight_map": {"a": "\\ud800.safetensors"}}',
        '{"weight_map": {"a": "../../outside.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "notes.txt"}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": "missing.safetensors"}}',
        '{"weight_map": []}',
        "5",
    ],
)
def test_an_index_that_makes_no_sense_is_refused(root: Path, text: str) -> None:
    (saved(root / "w") / INDEX).write_text(text)
    (root / "w" / "notes.txt").touch()
    (root.parent / "outside.safetensors").touch()
    refused(root, "w")


@pytest.mark.parametrize(
    "given", ["a" * 300, "a/" * 3000, "b" * 100_000, "notes.txt", "pipe.safetensors", ""]
)
def test_what_can_be_no_weights_is_refused(root: Path, given: str) -> None:
    (root / "notes.txt").touch()
    os.mkfifo(root / "pipe.safetensors")
    if given == "":
        (root / "pipe.safetensors").unlink()
    refused(root, given)


def test_a_folder_that_may_not_be_looked_into_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def may_not(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    saved(root / "w")
    monkeypatch.setattr(Path, "is_dir", may_not)
    assert refused(root, "w").rule == "cannot be read: Permission denied"


def test_an_adapter_with_its_configuration_is_taken(root: Path) -> None:
    folder = saved(root / "w", "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    assert weights_under(str(root), "w") == folder
    file = folder / "adapter_model.safetensors"
    assert weights_under(str(root), "w/adapter_model.safetensors") == file
