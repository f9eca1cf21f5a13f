"""A local Ray cluster of a benchmark's own, and apps whose denoisers sleep instead of computing."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.idle_decoder import IdleDecoder
from benchmarks.sleeping import SleepingModel
from configs.settings import AppConfig
from deployments.denoiser import Denoiser
from deployments.graph import bind

ROOT = Path(__file__).parents[1]
READY_S = 600.0
"""Longest wait for replicas: each imports for seconds of CPU time."""


@contextmanager
def cluster(num_cpus: int = 64, object_store_bytes: int = 2**30) -> Iterator[None]:
    """Slots are not cores: what runs here waits most of the time."""
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    folder = tempfile.mkdtemp(prefix="ltx", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    serve.start(proxy_location="Disabled")
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class SleepingDenoiser(Denoiser):
    """The real denoiser around a model that sleeps for ``step_s``."""

    def __init__(self, *args: Any, step_s: float) -> None:
        super().__init__(*args)
        self.sleeping = SleepingModel(step_s)
        self.engine.model = self.sleeping  # type: ignore[assignment]

    async def status(self) -> dict[str, Any]:
        return {**await super().status(), "passes": self.sleeping.passes}


class SlowDenoiser(SleepingDenoiser):
    """A GPU's time for one step of LTX-2.3 at its usual size, about."""

    STEP_S = 0.2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, step_s=self.STEP_S)


class BriskDenoiser(SleepingDenoiser):
    """Half of it, for the sake of a benchmark's own time."""

    STEP_S = 0.1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, step_s=self.STEP_S)


def slow_app(_: dict[str, str]) -> Application:
    """An import path for ``deploy``."""
    return _app_of(SlowDenoiser)


def brisk_app(_: dict[str, str]) -> Application:
    """An import path for ``deploy``."""
    return _app_of(BriskDenoiser)


def deploy(builder: str, denoisers: Mapping[str, Mapping[str, Any]]) -> None:
    """Run an app per name, built by a function of this module, with these options of its denoiser, and wait for it.

    By a configuration, as `serve deploy` does: only then do a changed number's other replicas live on.
    """
    applications = [
        {
            "name": name,
            "route_prefix": None,
            "import_path": f"benchmarks.on_ray:{builder}",
            "deployments": [{"name": "Denoiser", "ray_actor_options": {"num_cpus": 1}, **options}],
        }
        for name, options in denoisers.items()
    ]
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": applications}))
    end = time.monotonic() + READY_S
    while not all(_is_up(name, options["num_replicas"]) for name, options in denoisers.items()):
        if time.monotonic() > end:
            raise TimeoutError(f"the replicas are not there after {READY_S} s: {serve.status()}")
        time.sleep(0.5)


def statuses(app_name: str = "default") -> list[dict[str, Any]]:
    """What every denoiser replica says of itself."""
    return list(serve.get_deployment_handle("Denoiser", app_name).broadcast("status").results())


def _app_of(denoiser: type) -> Application:
    config = AppConfig.model_validate({"preset": "tiny", "denoiser": {"row_buckets": [1]}})
    return bind(config, denoiser=denoiser, av_decoder=IdleDecoder)


def _is_up(app_name: str, num_replicas: int) -> bool:
    app = serve.status().applications.get(app_name)
    if app is None or app.status != "RUNNING":
        return False
    return bool(app.deployments["Denoiser"].replica_states == {"RUNNING": num_replicas})
