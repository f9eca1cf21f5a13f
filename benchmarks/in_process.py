"""A preset's model and engine in this process, without Ray: what the in-process benchmarks have in common."""

import threading
from concurrent.futures import Future
from typing import Any

import torch

from configs.settings import AppConfig
from pipeline.checkpoint import load, read_card
from pipeline.conditioning import Conditioning, Context
from pipeline.engine import Engine
from pipeline.entry import Finished
from pipeline.noise import draw
from pipeline.sample import Job, Prefix
from pipeline.velocity import VelocityModel
from schemas.resolve import resolve
from schemas.resolved import ResolvedRequest


class InProcess:
    """One preset's transformer, and jobs for it whose contexts are noise."""

    def __init__(self, preset: str, device: str) -> None:
        self.config = AppConfig.model_validate({"preset": preset})
        self.card = read_card(self.config.model, self.config.limits, self.config.defaults)
        dtype = self.config.denoiser.dtype
        self.model = VelocityModel(load(self.config.model, "transformer", dtype=dtype, device=device))
        self.conditioning = Conditioning(positive=self._context(), negative=None, digest="noise")
        self._jobs = 0

    def engine(self, row_buckets: tuple[int, ...]) -> Engine:
        """A running engine; stop it."""
        engine = Engine(self.model, self.card, row_buckets=row_buckets)
        threading.Thread(target=engine.run, daemon=True).start()
        return engine

    def resolved(self, **fields: Any) -> ResolvedRequest:
        """A request of the preset's default geometry."""
        return resolve({"prompt": "a red ball", "seed": 1, "media": False, **fields}, self.card)

    def submit(
        self,
        engine: Engine,
        request: ResolvedRequest,
        sample_index: int = 0,
        *,
        prefix: Prefix | None = None,
        until: int | None = None,
    ) -> Future[Finished]:
        """One sample into the engine."""
        self._jobs += 1
        return engine.submit(
            Job(
                sample_id=str(self._jobs),
                request=request,
                sample_index=sample_index,
                conditioning=self.conditioning,
                prefix=prefix,
                until=until,
            )
        )

    def _context(self) -> Context:
        card, device = self.card, self.model.device
        return Context(
            video=draw(1, (card.max_prompt_tokens, card.video_context_dim)).to(device),
            audio=draw(2, (card.max_prompt_tokens, card.audio_context_dim)).to(device),
            mask=None,
        )


def device() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
