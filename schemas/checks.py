"""The rules of a resolved request: those of the card, and those between its own fields.

Every refusal is a ValueError (a Problem) that names the field as the caller knows it. Nothing is mended here.

This module does not know the sigma grid of a number of steps (the scheduler does, in the pipeline);
`check_sigmas` takes the grid, and is applied here where the request brought its own.
"""

from collections.abc import Sequence

import numpy as np

from schemas.card import ModelCard
from schemas.errors import invalid
from schemas.geometry import Geometry, geometry
from schemas.request import metadata_bytes
from schemas.resolved import ResolvedGuider, ResolvedRequest, first_stochastic_step, needs_negative_prompt
from schemas.sampling import Transition

CLOSE_TO_ONE = 1e-5
"""How near to 1 a sigma counts as 1: the first sigma of some grids is 0.99999994."""
MIN_STOCHASTIC_SIGMA = float(np.float32(1e-6))
"""The variance of a step falls with its sigma: here it is still a float32, further down it is not."""


def check(resolved: ResolvedRequest, card: ModelCard) -> None:
    """Raises ValueError (a Problem) where `resolved` cannot be sampled, or asks for more than the card
    allows."""
    geometry_of(resolved, card)
    _check_limits(resolved, card)
    _check_steps(resolved)
    _check_prefix(resolved)
    _check_guidance(resolved, card)
    if resolved.sigmas is not None:
        check_sigmas(resolved, [*resolved.sigmas, 0.0])
    elif resolved.num_inference_steps == 1 and card.scheduler.get("shift_terminal"):
        # diffusers stretches the grid to end at shift_terminal; with one sigma that is 0 / 0
        rule = "must be at least 2, so that the sigma grid can fall from 1 to the checkpoint's shift_terminal"
        raise invalid("num_inference_steps", 1, rule, "use 2, or sigmas [1.0]").exception()


def check_sigmas(resolved: ResolvedRequest, sigmas: Sequence[float]) -> None:
    """Raises ValueError (a Problem) where a stochastic step of this grid has no usable density.

    `sigmas`: [num_inference_steps + 1], the terminal 0 included. sde divides by 1 - sigma, and where sigma is
    close to 1 by 1 - sigmas[1] instead (Flow-GRPO): the two must not both be close to 1.
    """
    for modality in ("video", "audio"):
        kind = getattr(resolved.transition, modality).kind
        for step in getattr(resolved.stochastic_steps, modality):
            if kind == "sde" and _is_close_to_one(sigmas[step]) and _is_close_to_one(sigmas[1]):
                rule = f"must be below 1 by more than {CLOSE_TO_ONE:g}, or sde's noise grows without bound"
                remedy = f"use 0.999 or less, or leave step {step} out of stochastic_steps"
                raise invalid("sigmas.1", sigmas[1], rule, remedy).exception()
            lowest = step + 1 if kind == "cps" else step  # cps scales its noise by the next sigma
            if sigmas[lowest] < MIN_STOCHASTIC_SIGMA:
                rule = f"must be at least {MIN_STOCHASTIC_SIGMA:g} for step {step} to be stochastic"
                remedy = f"use a higher sigma, or leave step {step} out of stochastic_steps"
                raise invalid(f"sigmas.{lowest}", sigmas[lowest], rule, remedy).exception()


def geometry_of(resolved: ResolvedRequest, card: ModelCard) -> Geometry:
    """Sizes of each of the request's samples. Raises as `geometry` does."""
    return geometry(
        card,
        height=resolved.height,
        width=resolved.width,
        num_frames=resolved.num_frames,
        frame_rate=resolved.frame_rate,
    )


def check_num_steps(num_steps: int, field: str, card: ModelCard) -> None:
    """Raises ValueError (a Problem) for more steps than the card allows, before anything is listed per step.

    `field`: where they were given, num_inference_steps or sigmas.
    """
    _at_most(card.limits.max_inference_steps, field, num_steps, "steps")


def _check_limits(resolved: ResolvedRequest, card: ModelCard) -> None:
    limits = card.limits
    shorten, elsewhere = "shorten it", "keep it with the trainer, and send a key to it"
    negative_prompt, metadata = resolved.negative_prompt or "", resolved.metadata
    _at_most(
        limits.max_num_samples, "num_samples", resolved.num_samples, remedy="use {limit}, or several requests"
    )
    steps_field = "num_inference_steps" if resolved.sigmas is None else "sigmas"
    check_num_steps(resolved.num_inference_steps, steps_field, card)
    _at_most(limits.max_prompt_chars, "prompt", len(resolved.prompt), "characters", shorten)
    _at_most(limits.max_prompt_chars, "negative_prompt", len(negative_prompt), "characters", shorten)
    if metadata is not None:
        _at_most(limits.max_metadata_bytes, "metadata", metadata_bytes(metadata), "bytes of JSON", elsewhere)
    _at_most(limits.max_deadline_s, "deadline_s", resolved.deadline_s, "seconds")
    if resolved.state_dtype not in limits.state_dtypes:
        allowed = " or ".join(limits.state_dtypes)
        raise invalid(
            "state_dtype", resolved.state_dtype, f"must be {allowed} here", f"use {allowed}"
        ).exception()


def _at_most(limit: float, field: str, found: float, unit: str = "", remedy: str = "use {limit}") -> None:
    if found > limit:
        most = f"{limit:g}" if isinstance(limit, float) else str(limit)
        raise invalid(
            field, found, f"must be at most {most} {unit}".rstrip(), remedy.format(limit=most)
        ).exception()


def _check_steps(resolved: ResolvedRequest) -> None:
    num_steps = resolved.num_inference_steps
    last = num_steps - 1
    for modality in ("video", "audio"):
        transition: Transition = getattr(resolved.transition, modality)
        steps: tuple[int, ...] = getattr(resolved.stochastic_steps, modality)
        _check_rising("stochastic_steps", steps, last=last)
        if steps and not transition.is_stochastic:
            remedy = f"use a kind other than ode and a noise_level above 0 for {modality}"
            rule = f"cannot hold steps of {modality}, which is deterministic"
            raise invalid("stochastic_steps", steps, rule, remedy).exception()
        if transition.kind == "cps" and last in steps:
            rule = f"cannot hold the last step, {last}, for {modality} by cps, whose noise there is 0"
            raise invalid(
                "stochastic_steps", last, rule, f"leave {last} out, or use kind sde or dance"
            ).exception()
    _check_rising("return_steps", resolved.return_steps, last=num_steps)
    if num_steps not in resolved.return_steps:
        rule = f"must hold the last state, {num_steps}"
        raise invalid("return_steps", resolved.return_steps, rule, f"add {num_steps}").exception()


def _check_prefix(resolved: ResolvedRequest) -> None:
    if not resolved.shared_prefix:
        return
    if resolved.mode == "generate":
        rule, remedy = "cannot be given in mode generate", "leave it out, or use mode rollout"
        raise invalid("shared_prefix", True, rule, remedy).exception()
    if not resolved.shared_initial_noise:
        rule = "needs shared_initial_noise: samples that start apart have no steps in common"
        raise invalid("shared_prefix", True, rule, "set shared_initial_noise, or leave it out").exception()
    if first_stochastic_step(resolved) in (0, resolved.num_inference_steps):
        rule = "needs a first stochastic step above 0: the steps before it are what is shared"
        remedy = "name later stochastic_steps, or leave shared_prefix out"
        raise invalid("shared_prefix", True, rule, remedy).exception()


def _check_rising(field: str, steps: tuple[int, ...], *, last: int) -> None:
    before = -1
    for step in steps:
        if step > last:
            raise invalid(field, step, f"must be from 0 to {last}", f"use {last}").exception()
        if step <= before:
            raise invalid(field, steps, "must rise strictly", "sort them, each once").exception()
        before = step


def _check_guidance(resolved: ResolvedRequest, card: ModelCard) -> None:
    if (resolved.guider is not None) != (resolved.mode == "generate"):
        raise invalid(
            "guider", None, "must be there in mode generate, and only there", "resolve again"
        ).exception()
    if (resolved.negative_prompt is not None) != needs_negative_prompt(resolved):
        rule = "must be there where guidance is above 1, and only there"
        raise invalid("negative_prompt", resolved.negative_prompt, rule, "resolve again").exception()
    if resolved.guider is not None:
        _check_blocks(resolved.guider, card)


def _check_blocks(guider: ResolvedGuider, card: ModelCard) -> None:
    field, last = "guider.spatio_temporal_guidance_blocks", card.num_layers - 1
    blocks = guider.spatio_temporal_guidance_blocks
    for block in blocks:
        if block > last:
            rule = f"must be from 0 to {last}, the checkpoint's blocks"
            raise invalid(field, block, rule, f"use {last}").exception()
    if not blocks and (guider.stg_scale > 0 or guider.audio_stg_scale > 0):
        rule = "must name a block where an stg_scale is above 0"
        raise invalid(field, blocks, rule, "leave it out, or set both stg scales to 0").exception()


def _is_close_to_one(sigma: float) -> bool:
    return abs(1.0 - sigma) <= CLOSE_TO_ONE
