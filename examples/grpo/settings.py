"""What a run is made of. Every field is an argument of train.py too: `--learning-rate 0.003`, `--no-shuffle-advantages`."""

import json
from dataclasses import field
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from tyro.conf import arg

from schemas.sampling import LogProbKind

from .checks import check_together, known_reward, without_own_fields

Json = Annotated[
    dict[str, Any], AfterValidator(without_own_fields), arg(constructor=json.loads, metavar="JSON")
]
RewardName = Annotated[str, AfterValidator(known_reward)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Defaults are those of `make grpo`: the tiny checkpoint learns in a few minutes on two cores."""

    model: str = "tiny"
    """The checkpoint that the app serves."""
    dtype: str = "float32"
    """Of the transformer, as the app's preset has it."""
    device: str = "cpu"
    """Where the trainer computes; "cuda" gives its actor a GPU."""

    prompts: Annotated[tuple[str, ...], Field(min_length=1)] = ("a red ball rolls over a wooden floor",)
    """All of them take turns, `groups_per_iteration` at a time."""
    groups_per_iteration: PositiveInt = 1
    """Prompts that are sampled for one update."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Samples of a prompt, which are compared with each other."""
    request: Json = field(default_factory=dict)
    """Further fields of every request, as JSON: sizes, steps, transition, guidance (all are in schemas/request.py)."""

    video_reward: RewardName = "redness"
    """A name in rewards.py, or a function of your own, "package.module:function"."""
    audio_reward: RewardName = "loudness"
    """Likewise; the audio's log-probs have this one's advantages."""
    video_weight: NonNegativeFloat = 1.0
    """Of the video's loss; 0 leaves it out."""
    audio_weight: NonNegativeFloat = 1.0
    """Of the audio's loss; 0 leaves it out."""
    clip_range: PositiveFloat = 0.01
    """How far a ratio may move from 1. Made for one kind of log-prob, and for means over elements."""
    log_prob_kind: LogProbKind = "density"
    """The kind that `clip_range` is made for; rollouts with another one are refused."""
    kl_weight: NonNegativeFloat = 0.0
    """Of the distance per element to the policy without the adapter; 0 computes none."""
    shuffle_advantages: bool = False
    """The control: each group's advantages are given to its samples at random, so there is nothing to learn."""

    rank: PositiveInt = 8
    """Of the LoRA."""
    alpha: PositiveFloat = 16.0
    """Over the rank, what the LoRA is scaled by."""
    target_modules: str = r".*\.(to_q|to_k|to_v|to_out\.0|net\.0\.proj|net\.2)|(audio_)?proj_out"
    """Layers with a LoRA, a regular expression of whole names."""
    learning_rate: PositiveFloat = 3e-3
    """Of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """Longer gradients are cut to this norm."""
    epochs: PositiveInt = 1
    """Passes over the rollouts of an iteration, with an optimizer step each."""
    max_rows: PositiveInt | None = None
    """Rows of a forward pass with gradients, where the rollout's are too many. First ratios are then not exactly 1."""

    iterations: PositiveInt = 50
    """Updates, counted from the adapter's beginning, those before a resumption too."""
    on_policy: bool = False
    """Sample only once the update is published. Otherwise the next rollouts are sampled during the update."""
    max_staleness: NonNegativeInt = 1
    """Updates that the policy may have had since it sampled a group; an older group is left out."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of the adapter's initial values and of all noise."""
    checkpoint_every: PositiveInt = 10
    """Iterations from one checkpoint to the next."""
    reward_workers: PositiveInt = 1
    """Processes that compute rewards."""

    _check = pydantic.model_validator(mode="after")(check_together)
