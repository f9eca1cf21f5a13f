"""What a run must not be, told by name before anything is sampled or learned. The loop reads without this file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.noise import MODALITIES
from schemas.card import ModelCard
from schemas.resolve import resolve

from .rewards import named

if TYPE_CHECKING:
    from .settings import Settings

OWN_FIELDS = {"prompt", "num_samples", "seed", "mode", "media", "trajectory", "min_policy_version"}
"""Fields of a request that the trainer sets."""


def known_reward(name: str) -> str:
    """The name. Raises ValueError where it names no reward."""
    named(name)
    return name


def without_own_fields(request: dict[str, Any]) -> dict[str, Any]:
    """The request. Raises ValueError where it has a field that the trainer sets."""
    for name in request.keys() & OWN_FIELDS:
        raise ValueError(f"request.{name} is the trainer's to set, got {request[name]!r}; leave it out")
    return request


def check_together(settings: "Settings") -> "Settings":
    """The settings. Raises ValueError where two of them contradict each other."""
    if not (settings.video_weight or settings.audio_weight):
        raise ValueError("video_weight and audio_weight must not both be 0: there is nothing to learn")
    if not (settings.on_policy or settings.max_staleness):
        raise ValueError("max_staleness must be at least 1, got 0; for none, use on_policy")
    return settings


def check_app(settings: "Settings", card: ModelCard) -> None:
    """Raises ValueError for what the app cannot give, or the run could not learn from."""
    if settings.model != card.checkpoint:
        raise ValueError(f"model must be what the app serves, {card.checkpoint!r}, got {settings.model!r}")
    for prompt in settings.prompts:
        asked = {**settings.request, "prompt": prompt, "num_samples": settings.group_size}
        moves = resolve(asked, card).transition
    weights = {"video": settings.video_weight, "audio": settings.audio_weight}
    learning = [getattr(moves, m) for m in MODALITIES if weights[m] and getattr(moves, m).kind != "ode"]
    if not learning:
        raise ValueError("request.transition must be stochastic for a modality that has a weight")
    for move in learning:
        if move.log_prob_kind != settings.log_prob_kind:
            rule = f"must be that of request.transition, {move.log_prob_kind!r}, and clip_range made for it"
            raise ValueError(f"log_prob_kind {rule}, got {settings.log_prob_kind!r}")


def check_checkpoint(state: Mapping[str, Any], settings: "Settings") -> None:
    """Raises ValueError where the adapter that was saved is of another form, or has learned enough."""
    for name, value in state["form"].items():
        if getattr(settings, name) != value:
            raise ValueError(
                f"{name} must be the checkpoint's, {value!r}, got {getattr(settings, name)!r}; or begin in another folder"
            )
    if state["updates"] >= settings.iterations:
        raise ValueError(
            f"iterations must be above the checkpoint's {state['updates']}, got {settings.iterations}"
        )


def check_fresh(ratio: float, clip_range: float) -> None:
    """Raises RuntimeError where the ratio of a rollout of these very weights is not 1 or near it."""
    if abs(ratio - 1) > clip_range:
        raise RuntimeError(
            f"the ratio of a fresh rollout should be 1 and is {ratio:g}, beyond clip_range; the app samples from other "
            "weights than the trainer's, or computes otherwise. Start it anew, or publish the trainer's own transformer"
        )
