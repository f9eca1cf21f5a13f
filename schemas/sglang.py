"""What a trainer written for SGLang's `POST /rollout/generate` asks for, in the words of that server, and how each of
them reads here.

The fields, their types and their defaults are that server's; `rollout_audio_sde_type` and `rollout_audio_noise_level` are
added. `schemas.sglang_answer` makes the answer.

Invariants:
* a field or a value that would mean something else here is refused with its name, never ignored; fields that are
  taken without effect are listed in `WITHOUT_EFFECT`, each with the reason;
* every problem that the translated request meets is told with the name of the field that the caller wrote.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from schemas.errors import Problem, invalid
from schemas.fields import MAX_ITEMS, Bool, Contract, Count, Float
from schemas.request import FrameRate, Prompt, RolloutRequest, Seed, Steps, Text
from schemas.sampling import TransitionKind
from schemas.validation import validated

WITHOUT_EFFECT = {
    "generator_device": "noise is always drawn on the CPU, so that it does not depend on the device",
    "suppress_logs": "prompts are not logged in any case",
    "negative_prompt": "with guidance_scale 1 there is nothing to lead away from, here as there",
}
"""Taken, and without effect on what is sampled."""

FIELD_NAMES = {
    "num_samples": "num_outputs_per_prompt",
    "frame_rate": "fps",
    "guidance": "guidance_scale",
    "transition.video.kind": "rollout_sde_type",
    "transition.video": "rollout_noise_level",
    "transition.audio.kind": "rollout_audio_sde_type",
    "transition.audio": "rollout_audio_noise_level",
    "stochastic_steps": "rollout_sde_step_indices",
    "return_steps": "rollout_return_step_indices",
}
"""Of our fields that are called otherwise there; the first that is the field's own name or the beginning of it."""
_WORDS = re.compile(r"\b(num_samples|frame_rate|stochastic_steps|return_steps)\b")
"""Those that stand in rules and remedies."""


class SGLangRequest(Contract):
    """The body of `POST /rollout/generate`. null is "left out" in every field that may be."""

    prompt: Prompt
    """What is to be seen and heard."""
    negative_prompt: Text | None = None
    """What guidance leads away from; null: the empty text."""
    seed: Seed | None = None
    """Of all noise, with the sample's index. null: drawn, and echoed."""
    generator_device: Literal["cuda", "cpu"] | None = "cuda"
    """Taken, and without effect: noise is drawn on the CPU."""
    width: Count | None = None
    """Pixels."""
    height: Count | None = None
    """Pixels."""
    num_inference_steps: Count | None = None
    """Denoising steps."""
    num_outputs_per_prompt: Count | None = None
    """Samples of the group; null: 1."""
    guidance_scale: Float | None = None
    """Of video and audio. null: 1, which is off."""
    true_cfg_scale: Float | None = None
    """Refused: use guidance_scale."""
    num_frames: Count | None = None
    """Frames of video."""
    fps: FrameRate | None = None
    """Frames per second."""
    rollout: Bool = True
    """False: what a user would watch, by the native guider, without log-probs."""
    rollout_sde_type: TransitionKind = "sde"
    """How video moves in its stochastic steps. dance is added to that server's kinds."""
    rollout_noise_level: Float = 0.7
    """Of video. Without effect where rollout_sde_type is ode."""
    rollout_log_prob_no_const: Bool = False
    """False: the Gaussian log-density; true: -(x' - mean)^2."""
    rollout_debug_mode: Bool | None = None
    """true is refused: such tensors are not kept."""
    rollout_return_denoising_env: Bool = False
    """Whether the answer has what the transformer attended to."""
    rollout_return_dit_trajectory: Bool = False
    """Whether the answer has the states."""
    rollout_sde_step_indices: Steps | None = None
    """Steps that are stochastic; null: all that can be."""
    rollout_return_step_indices: Steps | None = None
    """States to return, where state num_inference_steps is the last; null: all."""
    image_path: Annotated[list[str], Field(max_length=MAX_ITEMS)] | str | None = None
    """Refused: a sample starts from a prompt and noise alone."""
    suppress_logs: Bool = False
    """Taken, and without effect."""
    extra_sampling_params: dict[str, Any] | None = None
    """`{"quality": "exact"}`, which is what is always done; anything else is refused."""

    rollout_audio_sde_type: TransitionKind = "ode"
    """Added: how audio moves. ode, as in that server, gives it no log-probs."""
    rollout_audio_noise_level: Float = 0.7
    """Added: of audio. Without effect where rollout_audio_sde_type is ode."""

    @classmethod
    def of(cls, given: object) -> Self:
        """The request that `given` describes. Raises ValueError (a Problem)."""
        return validated(cls, given)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        return {
            name: value for name, value in given.items() if value is not None or name not in cls.model_fields
        }

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        if self.image_path:
            rule = "image inputs cannot be sampled: a sample starts from a prompt and noise alone"
            raise invalid("image_path", self.image_path, rule, "leave it out").refusal()
        if self.true_cfg_scale is not None:
            rule = "cannot be given: LTX-2.3 has one kind of guidance"
            raise invalid("true_cfg_scale", self.true_cfg_scale, rule, "use guidance_scale").refusal()
        if self.rollout_debug_mode:
            rule = "cannot be true: noises, means and model outputs are not kept"
            remedy = "leave it out; states, sigmas and contexts are enough to compute them again"
            raise invalid("rollout_debug_mode", True, rule, remedy).refusal()
        for name, value in (self.extra_sampling_params or {}).items():
            if (name, value) != ("quality", "exact"):
                remedy = "use a field of this route, or of POST /v1/rollouts"
                raise invalid(f"extra_sampling_params.{name}", value, "is not supported", remedy).refusal()
        if self.negative_prompt and self.guidance_scale is None and self.rollout:
            rule = "is required with negative_prompt"
            raise invalid("guidance_scale", None, rule, "use a scale above 1, or 1 for none").refusal()
        if self.guidance_scale is not None and not self.rollout:
            rule = "cannot be given when rollout is false: the native guider has scales of its own"
            remedy = "leave it out, or use POST /v1/rollouts with mode generate and guider"
            raise invalid("guidance_scale", self.guidance_scale, rule, remedy).refusal()
        if (
            self.rollout_return_step_indices is not None
            and self.rollout
            and not self.rollout_return_dit_trajectory
        ):
            rule = "has no effect without rollout_return_dit_trajectory"
            remedy = "set that to true, or leave this out"
            raise invalid(
                "rollout_return_step_indices", self.rollout_return_step_indices, rule, remedy
            ).refusal()
        return self


def rollout_request_of(asked: SGLangRequest) -> dict[str, Any]:
    """The same in the words of `RolloutRequest`, as a dict of what was given. Raises ValueError (a Problem, in the
    caller's words)."""
    given: dict[str, Any] = {
        "prompt": asked.prompt,
        "num_samples": asked.num_outputs_per_prompt,
        "seed": asked.seed,
        "height": asked.height,
        "width": asked.width,
        "num_frames": asked.num_frames,
        "frame_rate": asked.fps,
        "num_inference_steps": asked.num_inference_steps,
        "sigma_shift": "constant",  # that server's grid, in an evaluation too
        **(_moves(asked) if asked.rollout else _watched(asked)),
    }
    request = {name: value for name, value in given.items() if value is not None}
    try:
        RolloutRequest.of(request)
    except ValueError as error:
        raise in_their_words(error) from None
    return request


def in_their_words(error: Exception) -> Exception:
    """The same error, with its field as the caller of `POST /rollout/generate` wrote it."""
    problem = Problem.of(error)
    return error if problem is None else renamed(problem).exception()


def renamed(problem: Problem) -> Problem:
    """The problem with every field under the name that the caller wrote."""

    def in_text(text: str) -> str:
        return _WORDS.sub(lambda word: FIELD_NAMES[word[0]], text)

    return replace(
        problem,
        field=None if problem.field is None else _renamed(problem.field),
        rule=in_text(problem.rule),
        remedy=in_text(problem.remedy),
    )


def _renamed(field: str) -> str:
    for ours, theirs in FIELD_NAMES.items():
        if field == ours or field.startswith(f"{ours}."):
            rest = field.removeprefix(ours)
            return f"{theirs}{rest}" if rest.removeprefix(".").isdecimal() else theirs
    return field


def _moves(asked: SGLangRequest) -> dict[str, Any]:
    scale = 1.0 if asked.guidance_scale is None else asked.guidance_scale
    kind = "squared_error" if asked.rollout_log_prob_no_const else "density"
    levels = {
        "video": (asked.rollout_sde_type, asked.rollout_noise_level),
        "audio": (asked.rollout_audio_sde_type, asked.rollout_audio_noise_level),
    }
    keeps = asked.rollout_return_dit_trajectory
    asked_steps = asked.rollout_return_step_indices
    return {
        "negative_prompt": asked.negative_prompt if scale > 1 else None,
        "guidance": {"video": scale, "audio": scale},
        "transition": {
            modality: {
                "kind": move,
                "log_prob_kind": kind,
                **({} if move == "ode" else {"noise_level": level}),
            }
            for modality, (move, level) in levels.items()
        },
        "stochastic_steps": _listed(asked.rollout_sde_step_indices),
        "trajectory": keeps,
        "return_steps": ("all" if asked_steps is None else _listed(asked_steps)) if keeps else None,
    }


def _watched(asked: SGLangRequest) -> dict[str, Any]:
    return {"mode": "generate", "negative_prompt": asked.negative_prompt, "trajectory": False}


def _listed(steps: tuple[int, ...] | None) -> list[int] | None:
    return None if steps is None else list(steps)
