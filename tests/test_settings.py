"""Every preset loads whole, and a key that is not one is refused wherever it stands."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from configs.settings import PRESETS, AppConfig, load_preset

FILES = sorted([*PRESETS.glob("*.yaml"), *PRESETS.glob("*.yml")])
NAMES = [file.stem for file in FILES]


def _config(**given: Any) -> AppConfig:
    return AppConfig.model_validate(given)


def _paths_of_trees(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _paths_of_trees(value, (*path, key))


def _with_key(tree: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """A copy of the tree with one key more at `path`."""
    if not path:
        return {**tree, "colour": "blue"}
    return {**tree, path[0]: _with_key(tree[path[0]], path[1:])}


def test_the_four_presets_are_there() -> None:
    assert NAMES == ["ltx23_8gpu", "ltx23_h200", "small", "tiny"]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_loads_and_survives_its_dump(name: str) -> None:
    config = _config(preset=name)
    assert config.preset == name
    assert AppConfig.model_validate(config.model_dump()) == config
    assert AppConfig.model_validate(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize("name", NAMES)
def test_what_a_preset_says_is_what_is_loaded(name: str) -> None:
    loaded = json.loads(_config(preset=name).model_dump_json())

    def holds(said: Any, found: Any) -> bool:
        if isinstance(said, Mapping):
            return all(holds(value, found[key]) for key, value in said.items())
        return bool(said == found)

    assert holds(load_preset(name), loaded)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_key_is_refused_at_every_level_of_a_preset(name: str, tmp_path: Path) -> None:
    tree = load_preset(name)
    paths = list(_paths_of_trees(tree))
    assert ("limits",) in paths
    for path in paths:
        file = tmp_path / "changed.yaml"
        file.write_text(yaml.safe_dump(_with_key(tree, path)))
        with pytest.raises(ValidationError) as caught:
            _config(preset=str(file))
        assert [error["loc"] for error in caught.value.errors()] == [(*path, "colour")]
        assert caught.value.errors()[0]["type"] == "extra_forbidden"


@pytest.mark.parametrize(
    "subtree", ["text_encoder", "denoiser", "decoder", "client", "http", "limits", "defaults"]
)
def test_an_unknown_key_is_refused_beside_a_preset(subtree: str) -> None:
    with pytest.raises(ValidationError, match=r"colour[\s\S]*Extra inputs"):
        AppConfig.model_validate({"preset": "tiny", subtree: {"colour": "blue"}})
    with pytest.raises(ValidationError, match=r"colour[\s\S]*Extra inputs"):
        AppConfig.model_validate({"colour": "blue"})


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_no_preset_says_a_key_twice(file: Path) -> None:
    def check(node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), keys
            for _, value in node.value:
                check(value)

    node = yaml.compose(file.read_text())
    assert node is not None
    check(node)


def test_the_tiny_preset_is_the_default() -> None:
    config = _config()
    assert config == _config(preset="tiny")
    assert config.model == "tiny"
    assert (config.defaults.height, config.defaults.width, config.defaults.num_frames) == (64, 96, 9)
    assert (config.denoiser.dtype, config.denoiser.device) == ("float32", "cpu")
    assert config.denoiser.row_buckets == (1, 2, 4, 8)


def test_keys_beside_a_preset_go_over_its_own_one_by_one() -> None:
    config = AppConfig.model_validate(
        {
            "preset": "tiny",
            "defaults": {"height": 128},
            "denoiser": {"row_buckets": [2]},
            "batch_invariant": True,
        }
    )
    assert (config.defaults.height, config.defaults.width) == (128, 96)
    assert config.denoiser.row_buckets == (2,)
    assert config.limits == _config().limits


def test_a_preset_may_be_a_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({**load_preset("tiny"), "model": "org/other-checkpoint"}))
    assert _config(preset=str(file)).model == "org/other-checkpoint"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"preset": "huge"}, "preset must be one of ltx23_8gpu, ltx23_h200, small, tiny or a path"),
        ({"denoiser": {"row_buckets": []}}, "row_buckets"),
        ({"denoiser": {"row_buckets": [4, 2, 2]}}, r"rise strictly, got \[4, 2, 2\]; use \[2, 4\]"),
        ({"denoiser": {"row_buckets": [0, 1]}}, r"use \[1\]"),
        ({"denoiser": {"num_threads": 0}}, "num_threads"),
        ({"denoiser": {"dtype": "float64"}}, "dtype"),
        (
            {"batch_invariant": True},
            r"exactly one size with batch_invariant, got \[1, 2, 4, 8\]; use \[1\] on a CPU",
        ),
        ({"defaults": {"num_inference_steps": 101}}, "at most limits.max_inference_steps, 100, got 101"),
        ({"defaults": {"deadline_s": 4000}}, "at most limits.max_deadline_s, 3600, got 4000"),
        ({"client": {"lease_s": 0.5}}, "pulse_s must be at most half of lease_s"),
        ({"limits": {"max_metadata_bytes": 5000}}, "max_metadata_bytes"),
        ({"limits": None}, "limits"),
        ({"preset": 3}, "preset"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        AppConfig.model_validate(given)


def test_a_yaml_that_is_no_tree_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("[1, 2]")
    with pytest.raises(ValidationError, match="must hold keys and values, got list"):
        _config(preset=str(file))


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        _config().client.lease_s = 1.0
