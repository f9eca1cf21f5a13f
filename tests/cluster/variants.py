"""The stages as tests bind them: slow where a test wants it, and telling what they did. Their results are the real ones.

The text encoder and the decoder are slow for prompts that say SLOWLY.
"""

import asyncio
import os
import time
from typing import Any

import pyarrow as pa

from deployments.av_decoder import AVDecoder
from deployments.denoiser import Denoiser
from deployments.text_encoder import TextEncoder
from pipeline.velocity import Latents, VelocityModel
from schemas.arrow import manifest_of

SLOWLY = "slowly"
STEP_S = 0.1
"""Seconds that a slow denoiser adds to each forward pass."""
ENCODE_S = 2.0
DECODE_S = 2.0


class SlowModel:
    """A VelocityModel that takes its time, and counts."""

    def __init__(self, model: VelocityModel) -> None:
        self._model = model
        self.device = model.device
        self.num_forwards = 0

    def __call__(self, *args: Any) -> Latents:
        self.num_forwards += 1
        time.sleep(STEP_S)
        return self._model(*args)


class TellingDenoiser(Denoiser):
    """Counts its calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_calls = 0

    async def __call__(self, *args: Any, **kwargs: Any) -> pa.Table:
        self.num_calls += 1
        return await super().__call__(*args, **kwargs)

    async def status(self) -> dict[str, Any]:
        return {**await super().status(), "pid": os.getpid(), "num_calls": self.num_calls}


class SlowDenoiser(TellingDenoiser):
    """Takes STEP_S more for each forward pass, and says which calls were cancelled and when which failed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.slow_model = SlowModel(self.model)
        self.engine.model = self.slow_model  # type: ignore[assignment]
        self.cancelled: list[dict[str, Any]] = []
        self.failed: dict[str, float] = {}

    async def __call__(
        self, conditioning: pa.Table, order: dict[str, Any], *args: Any, **kwargs: Any
    ) -> pa.Table:
        call = asyncio.ensure_future(super().__call__(conditioning, order, *args, **kwargs))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            num_forwards = self.slow_model.num_forwards
            call.cancel()
            await asyncio.wait([call])
            steps_after = self.slow_model.num_forwards - num_forwards
            self.cancelled.append({"sample_id": order["sample_id"], "steps_after": steps_after})
            raise
        except Exception:
            self.failed[order["sample_id"]] = time.time()
            raise

    async def status(self) -> dict[str, Any]:
        own = {
            "num_forwards": self.slow_model.num_forwards,
            "cancelled": self.cancelled,
            "failed": self.failed,
            "sizes": self._sizes(),
        }
        return {**await super().status(), **own}

    def _sizes(self) -> dict[str, int]:
        """What could grow with each publication."""
        transformer = self.model.transformer
        parameters = list(transformer.parameters())
        return {
            "modules": len(list(transformer.modules())),
            "parameters": len(parameters),
            "bytes": sum(parameter.nbytes for parameter in parameters),
        }


class SlowableTextEncoder(TextEncoder):
    """Takes ENCODE_S more for a prompt that says SLOWLY, and counts its calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_calls = 0

    async def __call__(self, prompt: str, negative_prompt: str | None = None) -> pa.Table:
        self.num_calls += 1
        if SLOWLY in prompt:
            await asyncio.sleep(ENCODE_S)
        return await super().__call__(prompt, negative_prompt)

    async def status(self) -> dict[str, int]:
        return {**await self.stats(), "pid": os.getpid(), "num_calls": self.num_calls}


class SlowableDecoder(AVDecoder):
    """Takes DECODE_S more for a prompt that says SLOWLY, and counts its calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_calls = 0

    async def __call__(self, trajectory: pa.Table) -> dict[str, pa.Table]:
        self.num_calls += 1
        if SLOWLY in manifest_of(trajectory)["request"]["prompt"]:
            await asyncio.sleep(DECODE_S)
        return await super().__call__(trajectory)

    async def status(self) -> dict[str, int]:
        return {"pid": os.getpid(), "num_calls": self.num_calls}
