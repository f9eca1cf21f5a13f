"""What the README and docs/ say by name is there by that name."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from configs.settings import PRESETS, AppConfig
from deployments.client import RolloutClient
from deployments.http.problems import MEANINGS
from deployments.http.rollouts import FORMS
from pipeline.engine import Engine
from pipeline.profile import ExecutionProfile
from schemas.arrow import manifest_of
from schemas.errors import CODES
from schemas.request import RolloutRequest
from tests.fake_archive import FakeArchive
from tests.http_apps import app_of

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TRAJECTORY, OPERATIONS = ROOT / "docs" / "trajectory.md", ROOT / "docs" / "operations.md"
WEIGHTS, HTTP = ROOT / "docs" / "weights.md", ROOT / "docs" / "http.md"


def first_cells(page: Path, header: str) -> list[str]:
    """The words in code in the first column of the table below a header row that begins with ``header``."""
    rows = page.read_text().split(f"| {header} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`(\w+)[^`]*`", row.split("|")[1])]


def yaml_blocks(page: Path) -> list[Any]:
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]


def unknown_keys(tree: dict[str, Any], schema: type[BaseModel]) -> set[str]:
    return set(tree) - set(schema.model_fields)


def test_the_serve_config_for_gpus_names_every_deployment_and_no_unknown_key() -> None:
    """Serve ignores keys that it does not know, so a slip would go unseen."""
    (config,) = yaml_blocks(OPERATIONS)
    assert not unknown_keys(config, ServeDeploySchema)
    ServeDeploySchema.model_validate(config)
    (app,) = config["applications"]
    assert not unknown_keys(app, ServeApplicationSchema)
    assert not any(unknown_keys(deployment, DeploymentSchema) for deployment in app["deployments"])
    names = ["Ingress", "RolloutArchive", "LeaseBoard", "TextEncoder", "Denoiser", "AVDecoder"]
    assert [deployment["name"] for deployment in app["deployments"]] == names
    room = {deployment["name"]: deployment["max_ongoing_requests"] for deployment in app["deployments"]}
    settings = AppConfig.model_validate(app["args"])
    assert settings.denoiser.row_buckets[-1] < room["Denoiser"]
    assert settings.limits.max_deadline_s < config["http_options"]["request_timeout_s"]


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_every_setting_that_is_named_exists(page: Path) -> None:
    tree = {name: field.annotation for name, field in AppConfig.model_fields.items()}
    parts = {
        name: part for name, part in tree.items() if isinstance(part, type) and issubclass(part, BaseModel)
    }
    named = re.findall(rf"`({'|'.join(parts)})\.(?!py`)(\w+)(?:: [^`]*)?`", page.read_text())
    others = {"client.policy_version"}  # no setting
    unknown = [f"{part}.{key}" for part, key in named if key not in parts[part].model_fields]
    assert not set(unknown) - others


def test_every_call_in_the_page_on_weights_is_one() -> None:
    text = WEIGHTS.read_text()
    for method in re.findall(r"client\.(\w+)\(", text):
        assert callable(getattr(RolloutClient, method)), method
    arguments = inspect.signature(RolloutClient.publish_weights).parameters
    for call in re.findall(r"publish_weights\((.*?)\)\s+#", text, re.DOTALL):
        assert set(re.findall(r"(\w+)=", call)) <= set(arguments), call
    gauges = re.findall(r"`ltx_rollout_(\w+)`", text)
    sources = "".join((ROOT / "deployments" / name).read_text() for name in ("metrics.py", "probe.py"))
    assert gauges and all(f'"{gauge}"' in sources for gauge in gauges)


def test_the_settings_in_the_readme_are_settings() -> None:
    small, gpu = yaml_blocks(README)
    assert AppConfig.model_validate(small["args"]).denoiser.row_buckets == (4,)
    assert AppConfig.model_validate(gpu["args"]).denoiser.device == "cuda"
    assert not any(unknown_keys(deployment, DeploymentSchema) for deployment in gpu["deployments"])


def test_the_readme_names_every_preset_and_only_fields_of_a_request() -> None:
    assert set(first_cells(README, "preset | for")) == {file.stem for file in PRESETS.glob("*.yaml")}
    named = set(first_cells(README, "field | default |")) - {"field"}
    assert len(named) > 15 and named <= set(RolloutRequest.model_fields)


def test_the_execution_profile_and_the_codes_are_described_whole() -> None:
    assert set(first_cells(TRAJECTORY, "field |")) == set(ExecutionProfile.__dataclass_fields__)
    assert set(first_cells(OPERATIONS, "code | raised as |")) == set(CODES)


def test_the_manifest_is_described_whole(table: Any, order: Any, model: Any, card: Any) -> None:
    engine = Engine(model, card, row_buckets=(1,))
    finished = engine.submit(order(num_inference_steps=2))
    while engine.tick():
        pass
    trajectory = table(finished.result(timeout=0))
    # `encode_s` and the other times are named in the row of `timings`.
    assert set(first_cells(TRAJECTORY, "key |")) == set(manifest_of(trajectory))
    assert set(first_cells(TRAJECTORY, "column | type |")) == set(trajectory.column_names)


@pytest.mark.parametrize("page", [README, TRAJECTORY, OPERATIONS, HTTP], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if not link.startswith("http")]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_page_on_http_has_every_route_form_and_status() -> None:
    page = HTTP.read_text()
    document = app_of(FakeArchive()).openapi()
    routes = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert set(re.findall(r"\| `([A-Z]+ /[^`]*)` \|", page)) == routes
    assert set(re.findall(r"\| `(\w+/[^`]*)` \|", page)) == set(FORMS)
    # 405 is Starlette's own, wherever a method is not one.
    assert set(map(int, first_cells(HTTP, "status |"))) == {*MEANINGS, 405}
    told = re.findall(r"`(\w+)` \(", page.split("**Events.**", 1)[1].split("\n\n", 1)[0])
    assert set(told) == {"started", "progress"}
