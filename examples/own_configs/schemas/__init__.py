"""The trainer's own records; of the same name as this project's folder again."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Update:
    step: int
    mean_log_prob: float
    num_samples: int
