"""A local Ray cluster of a benchmark's own, and denoisers that sleep instead of computing."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve

from deployments.denoiser import Denoiser
from pipeline.velocity import PLAIN, Latents, Perturbation, Row
from schemas.geometry import Geometry

ROOT = Path(__file__).parents[1]
STEP_S = float(os.environ.get("BENCH_STEP_S", "0.2"))
"""A GPU's time for one step of LTX-2.3 at its usual size, about."""


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


class SleepingModel:
    """In a VelocityModel's place: a forward pass is a nap."""

    device = torch.device("cpu")

    def __call__(
        self, batch: Sequence[Row], geometry: Geometry, perturbation: Perturbation = PLAIN
    ) -> Latents:
        time.sleep(STEP_S)
        return {
            modality: torch.zeros(len(batch), *batch[0].latents[modality].shape)
            for modality in ("video", "audio")
        }


class SleepingDenoiser(Denoiser):
    """The real denoiser around a model that sleeps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.engine.model = SleepingModel()  # type: ignore[assignment]


def statuses(app_name: str = "default") -> list[dict[str, Any]]:
    """What every denoiser replica says of itself."""
    return list(serve.get_deployment_handle("Denoiser", app_name).broadcast("status").results())
