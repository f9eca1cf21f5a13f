"""What a run is made of. Every field is an argument of train.py too: `--learning-rate 0.003`, `--no-shuffle-advantages`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Defaults are those of `make grpo`: the tiny checkpoint learns in a few minutes on two cores."""

    model: str = "tiny"
    """The checkpoint that the app serves."""
    dtype: str = "float32"
    """Of the transformer, as the app's preset has it."""
    device: str = "cpu"
    """Where the trainer computes; "cuda" gives its actor a GPU."""

    prompts: tuple[str, ...] = ("a red ball rolls over a wooden floor",)
    """All of them take turns, `groups_per_iteration` at a time."""
    groups_per_iteration: int = 1
    """Prompts that are sampled for one update."""
    group_size: int = 16
    """Samples of a prompt, which are compared with each other."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request, as JSON: sizes, steps, transition, guidance."""

    video_reward: str = "redness"
    audio_reward: str = "loudness"
    """Names in rewards.py, or a function of your own, "package.module:function"."""
    video_weight: float = 1.0
    audio_weight: float = 1.0
    """Of each modality's loss; 0 leaves it out."""
    clip_range: float = 0.01
    """How far a ratio may move from 1. Made for one kind of log-prob, and for means over elements."""
    log_prob_kind: str = "density"
    """The kind that `clip_range` is made for; rollouts with another one are refused."""
    kl_weight: float = 0.0
    """Of the distance to the policy without the adapter; 0 computes none."""
    shuffle_advantages: bool = False
    """The control: each group's advantages are given to its samples at random, so there is nothing to learn."""

    rank: int = 8
    alpha: float = 16.0
    target_modules: str = r".*\.(to_q|to_k|to_v|to_out\.0|net\.0\.proj|net\.2)|(audio_)?proj_out"
    """Layers with a LoRA, a regular expression of whole names."""
    learning_rate: float = 3e-3
    max_grad_norm: float = 1.0
    epochs: int = 1
    """Passes over the rollouts of an iteration, with an optimizer step each."""
    max_rows: int | None = None
    """Rows of a forward pass with gradients, where the rollout's are too many. First ratios are then not exactly 1."""

    iterations: int = 50
    on_policy: bool = False
    """Sample only once the update is published. Otherwise the next rollouts are sampled during the update."""
    max_staleness: int = 1
    """Updates that the policy may have had since it sampled a group; an older group is left out."""
    seed: int = 0
    """Of the adapter's initial values and of all noise."""
    checkpoint_every: int = 10
    """Iterations from one checkpoint to the next."""
    reward_workers: int = 1
    """Processes that compute rewards."""
