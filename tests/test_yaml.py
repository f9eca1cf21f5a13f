"""Every YAML of the repository says what its reader understands: Serve itself ignores a key that it does not know."""

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema

from configs.settings import PRESETS, AppConfig
from deployments.graph import build_app
from schemas.card import Limits

ROOT = Path(__file__).parents[1]
SERVE_FILES = sorted(ROOT.glob("*.yaml"))
LOOPBACK = "127.0.0.1"


def unknown_keys(given: Any, annotation: Any, path: str = "") -> Iterator[str]:
    """Where ``given`` has keys that the models in ``annotation`` do not have; dicts of any keys end the search."""
    if isinstance(given, list):
        for index, item in enumerate(given):
            yield from unknown_keys(item, get_args(annotation)[0], f"{path}[{index}]")
        return
    models = [
        model for model in _parts(annotation) if isinstance(model, type) and issubclass(model, BaseModel)
    ]
    if not isinstance(given, Mapping) or not models:
        return
    (model,) = models
    for key, value in given.items():
        if key in model.model_fields:
            yield from unknown_keys(value, model.model_fields[key].annotation, f"{path}.{key}".lstrip("."))
        else:
            yield f"{path}.{key}".lstrip(".")


def _parts(annotation: Any) -> tuple[Any, ...]:
    union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if union else (annotation,)


def load(file: Path) -> dict[str, Any]:
    tree = yaml.safe_load(file.read_text())
    assert isinstance(tree, dict)
    return tree


def deployments_of_the_graph() -> set[str]:
    names, pending, seen = set(), [build_app(AppConfig())], set()
    while pending:
        app = pending.pop()
        if id(app) in seen:
            continue
        seen.add(id(app))
        bound = app._bound_deployment
        names.add(bound.name)
        arguments = [*bound.init_args, *bound.init_kwargs.values()]
        pending += [argument for argument in arguments if isinstance(argument, type(app))]
    return names


def test_the_files_are_found() -> None:
    assert [file.name for file in SERVE_FILES] == ["serve_config.yaml"]


def test_the_search_finds_keys_that_serve_would_ignore() -> None:
    tree = {
        "http_options": {"hots": LOOPBACK},
        "applications": [
            {"deployments": [{"max_qued_requests": 3, "ray_actor_options": {"num_cpu": 1}}], "args": {"x": 1}}
        ],
    }
    assert list(unknown_keys(tree, ServeDeploySchema)) == [
        "http_options.hots",
        "applications[0].deployments[0].max_qued_requests",
        "applications[0].deployments[0].ray_actor_options.num_cpu",
    ]


@pytest.mark.parametrize("file", SERVE_FILES, ids=lambda file: file.name)
def test_serve_knows_every_key_and_takes_every_value(file: Path) -> None:
    tree = load(file)
    assert list(unknown_keys(tree, ServeDeploySchema)) == []
    ServeDeploySchema.model_validate(tree)


@pytest.mark.parametrize("file", SERVE_FILES, ids=lambda file: file.name)
def test_it_names_the_deployments_of_the_graph_and_limits_each(file: Path) -> None:
    for application in load(file)["applications"]:
        assert application["import_path"] == "deployments.graph:build_app"
        assert {deployment["name"] for deployment in application["deployments"]} == deployments_of_the_graph()
        for deployment in application["deployments"]:
            limits = {"max_ongoing_requests", "max_queued_requests", "graceful_shutdown_timeout_s"}
            assert deployment.keys() >= {"num_replicas", "ray_actor_options", *limits}, deployment["name"]
            assert "num_cpus" in deployment["ray_actor_options"], deployment["name"]
            assert all(deployment[limit] > 0 for limit in limits), deployment["name"]


@pytest.mark.parametrize("file", SERVE_FILES, ids=lambda file: file.name)
def test_its_arguments_are_settings_that_fit_its_limits(file: Path) -> None:
    for application in load(file)["applications"]:
        config = AppConfig.model_validate(application["args"])
        by_name = {deployment["name"]: deployment for deployment in application["deployments"]}
        assert by_name["Denoiser"]["max_ongoing_requests"] > config.denoiser.row_buckets[-1], "a waiting room"
        assert by_name["TextEncoder"]["max_ongoing_requests"] >= config.text_encoder.max_rows
        assert by_name["Ingress"]["max_ongoing_requests"] > config.http.max_rollouts, (
            "so that the app answers"
        )
        archive = by_name["RolloutArchive"]
        assert archive["num_replicas"] == 1, "links lead to what one process keeps"
        assert archive["max_ongoing_requests"] > by_name["Ingress"]["max_ongoing_requests"], "all may wait"


@pytest.mark.parametrize("file", SERVE_FILES, ids=lambda file: file.name)
def test_it_listens_on_this_machine_alone_and_waits_longer_than_any_deadline(file: Path) -> None:
    tree = load(file)
    assert tree["http_options"]["host"] == LOOPBACK
    assert "grpc_options" not in tree
    for application in tree["applications"]:
        config = AppConfig.model_validate(application["args"])
        assert tree["http_options"]["request_timeout_s"] > config.limits.max_deadline_s


@pytest.mark.parametrize("file", sorted(PRESETS.glob("*.yaml")), ids=lambda file: file.name)
def test_a_preset_loads_has_no_unknown_key_and_says_every_limit(file: Path) -> None:
    tree = load(file)
    assert list(unknown_keys(tree, AppConfig)) == []
    config = AppConfig(preset=str(file))
    assert config.model == tree["model"]
    required = {name for name, field in Limits.model_fields.items() if field.is_required()}
    assert tree["limits"].keys() >= required
