"""A denoiser's inner parts without a cluster: the engine with its thread, a real transformer, and the follower."""

import threading
import time
from collections.abc import Mapping
from typing import Any

from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from deployments.weights.follower import Follower
from deployments.weights.source import WeightSource
from pipeline.engine import Engine
from pipeline.entry import PolicyStamp
from pipeline.policy import Policy
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from tests.weights import fresh


class Replica:
    """A follower with its engine, whose thread runs, and a real transformer."""

    def __init__(
        self,
        card: ModelCard,
        source: WeightSource,
        name: str = "me",
        base: Mapping[str, Tensor] | None = None,
    ) -> None:
        """base: the checkpoint's weights, where they are not the tiny one's."""
        self.transformer: LTX2VideoTransformer3DModel = fresh()
        if base is not None:
            self.transformer.load_state_dict(base)
        self.policy = Policy(self.transformer, num_threads=1)
        self.engine = Engine(VelocityModel(self.transformer), card, row_buckets=(1, 2))
        self.follower = Follower(source, self.policy, self.engine, name, self._stamp)

    def start(self) -> None:
        self.follower.catch_up()
        threading.Thread(target=self.engine.run, daemon=True).start()
        self.follower.start()

    def stop(self) -> None:
        self.follower.stop()
        self.engine.stop()

    def slow_down(self, step_s: float) -> None:
        """Let each forward pass take so much longer."""
        model = self.engine.model

        def slow(*args: Any) -> Any:
            time.sleep(step_s)
            return model(*args)

        self.engine.model = slow  # type: ignore[assignment]

    def wait_until_begun(self) -> None:
        """Until a sample has taken a step."""
        while not any(steps for _, steps, _ in self.engine.progress()):
            time.sleep(0.002)

    def _stamp(self) -> PolicyStamp:
        return PolicyStamp(version=self.policy.version, digest=self.policy.digest)
