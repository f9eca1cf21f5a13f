"""The trainer's own settings. This project has a folder of the same name; neither process sees the other's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerConfig:
    num_updates: int = 2
    samples_per_prompt: int = 4
    learning_rate: float = 1e-5
