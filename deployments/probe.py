"""The parity probe of a denoiser: one sample in so many is replayed where it was made, under the weights that made it.

It runs on the engine's thread before anything else may change the weights, so a difference is never that of a version.
What it costs is one replay in so many samples.
"""

import logging
import math
from collections.abc import Callable

import pyarrow as pa
from ray.serve import metrics

from deployments.metrics import PREFIX
from pipeline.entry import Finished
from pipeline.parity import ParityGap, parity
from pipeline.velocity import VelocityModel
from schemas.trajectory import read_trajectory

logger = logging.getLogger("ray.serve")


class ParityProbe:
    """Called with each finished sample; replays every ``every``-th that can be, and exports how far it is off."""

    def __init__(
        self, model: VelocityModel, pack: Callable[[Finished], pa.Table], every: int, alarm: float
    ) -> None:
        self._model, self._pack, self._every, self._alarm = model, pack, every, alarm
        self._seen = 0
        self.worst: ParityGap | None = None
        """Of the last sample that was replayed."""
        tags = ("modality", "step")
        self._difference = metrics.Gauge(
            PREFIX + "parity_log_prob_difference", "|replayed - recorded log-prob|", tag_keys=tags
        )
        self._ratio = metrics.Gauge(PREFIX + "parity_ratio", "exp(replayed - recorded)", tag_keys=tags)
        self._probed = metrics.Counter(PREFIX + "parity_samples", "samples that were replayed")
        self._gaps: list[ParityGap] = []

    def __call__(self, finished: Finished) -> None:
        job = finished.sample.job
        if job.request.mode != "rollout" or not job.request.trajectory or job.until is not None:
            return
        if len(set(finished.sample.policy_versions)) > 1:
            return
        self._seen += 1
        if self._seen % self._every:
            return
        try:
            trajectory = read_trajectory(self._pack(finished))
            self._gaps = parity(self._model.transformer, trajectory, job.conditioning)
        except Exception:
            logger.exception("the parity probe of sample %s failed", job.sample_id)
            return
        self._probed.inc()
        self.worst = max(self._gaps, key=_size, default=None)
        self.export()
        worst = self.worst
        if worst is not None and _size(worst) > self._alarm:
            logger.error(
                "replayed log-probs of sample %s are off by up to %g (%s, step %d), above parity_alarm %g",
                job.sample_id,
                worst.log_prob_difference,
                worst.modality,
                worst.step,
                self._alarm,
            )

    def export(self) -> None:
        """Set the gauges again: one that is set once vanishes from the export after 20 s."""
        for gap in self._gaps:
            tags = {"modality": gap.modality, "step": str(gap.step)}
            self._difference.set(gap.log_prob_difference, tags=tags)
            self._ratio.set(gap.ratio, tags=tags)


def _size(gap: ParityGap) -> float:
    """NaN is the largest difference of all."""
    return math.inf if math.isnan(gap.log_prob_difference) else gap.log_prob_difference
