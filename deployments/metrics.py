"""The denoiser's metrics: the engine's totals as counters, and what they came to since the last pulse as gauges.

A gauge that is set once vanishes from the export after 20 s and a histogram's sum there is a guess from its buckets, so
gauges are set at every pulse and sums are counters. The exact timings of a sample stand in its manifest.
"""

from dataclasses import dataclass, fields

from ray.serve import metrics

from pipeline.stats import EngineStats

PREFIX = "ltx_rollout_"

_COUNTERS = {
    "ticks": "turns of the step loop in which samples moved",
    "rows": "rows of samples in all forward passes",
    "padded_rows": "rows that only filled a batch up",
    "tokens": "video and audio tokens of the samples' rows",
    "forward_s": "seconds in the model's forward passes, as the step thread sees them",
    "busy_s": "seconds in which samples moved",
    "wait_s": "sum over the done samples of the seconds from submission to the first step",
    "done": "samples done",
    "cancelled": "samples cancelled by their callers",
    "expired": "samples out of time, or of a caller that fell silent",
    "failed": "samples failed",
    "bytes": "bytes of trajectories packed",
    "swaps": "times that weights changed or sampling halted",
    "swap_s": "seconds that it took, in which no sample moved",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What an interval's totals come to; 0 where nothing happened in it."""

    rows_per_tick: float
    padding_share: float
    """Of all rows of the forward passes, those that were padding."""
    tokens_per_second: float
    """While samples moved."""
    step_seconds: float
    """Of one turn of the loop."""

    @classmethod
    def between(cls, before: EngineStats, after: EngineStats) -> "Rates":
        """Rates of the interval between two looks at the totals."""
        ticks, busy_s = after.ticks - before.ticks, after.busy_s - before.busy_s
        rows, padded = after.rows - before.rows, after.padded_rows - before.padded_rows
        return cls(
            rows_per_tick=rows / ticks if ticks else 0.0,
            padding_share=padded / (rows + padded) if rows else 0.0,
            tokens_per_second=(after.tokens - before.tokens) / busy_s if busy_s else 0.0,
            step_seconds=busy_s / ticks if ticks else 0.0,
        )


class DenoiserMetrics:
    """Exports a denoiser's totals. Only to be made inside a replica; Serve adds its tags."""

    def __init__(self) -> None:
        self._counters = {
            name: metrics.Counter(PREFIX + name, description=text) for name, text in _COUNTERS.items()
        }
        self._gauges = {field.name: metrics.Gauge(PREFIX + field.name) for field in fields(Rates)}
        self._held = metrics.Gauge(PREFIX + "samples_held", description="samples waiting or active")
        self._version = metrics.Gauge(PREFIX + "policy_version", description="version that is sampled from")
        self._lag = metrics.Gauge(
            PREFIX + "policy_version_lag", description="versions that the replica is behind the policy"
        )
        self._exported = EngineStats()

    def export(self, stats: EngineStats, num_held: int, version: int, version_lag: int) -> None:
        """Bring the counters up to ``stats`` and set the gauges for the time since the last export."""
        for field in fields(EngineStats):
            grown = getattr(stats, field.name) - getattr(self._exported, field.name)
            if grown > 0:
                self._counters[field.name].inc(grown)
        for field in fields(Rates):
            self._gauges[field.name].set(getattr(Rates.between(self._exported, stats), field.name))
        self._held.set(num_held)
        self._version.set(version)
        self._lag.set(version_lag)
        self._exported = stats

    def packed(self, num_bytes: int) -> None:
        """A trajectory of this size was packed."""
        self._counters["bytes"].inc(num_bytes)
