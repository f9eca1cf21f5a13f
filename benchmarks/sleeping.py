"""A model that sleeps instead of computing: a device that one row does not fill, so that a pass takes the same time
whatever its rows. What is measured around it is the scheduler, and simulated as far as the device goes."""

import time
from collections.abc import Sequence

import torch

from pipeline.velocity import PLAIN, Latents, Perturbation, Row
from schemas.geometry import Geometry


class SleepingModel:
    """In a VelocityModel's place: a forward pass is a nap."""

    device = torch.device("cpu")

    def __init__(self, pass_s: float) -> None:
        self.pass_s = pass_s
        self.passes: list[tuple[float, float]] = []
        """Begin and end of every pass, on the machine's monotonic clock."""

    def __call__(
        self, batch: Sequence[Row], geometry: Geometry, perturbation: Perturbation = PLAIN
    ) -> Latents:
        began = time.monotonic()
        time.sleep(self.pass_s)
        self.passes.append((began, time.monotonic()))
        return {
            modality: torch.zeros(len(batch), *batch[0].latents[modality].shape)
            for modality in ("video", "audio")
        }
