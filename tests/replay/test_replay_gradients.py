"""Replay's gradients: they are those of the log-probs, by finite differences, and reach every parameter.

The engine computes in float32, so a difference quotient carries the log-prob's rounding, about 1e-7, over twice its
width. Along the gradient, where the log-prob changes fastest, the quotient is good to a per mille. A gradient that misses
one of the rows, or is the other modality's, is off by far more, as two of the tests here show.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from pipeline.checkpoint import load
from pipeline.conditioning import Conditioning
from pipeline.noise import MODALITIES, Modality
from pipeline.replay import log_probs
from schemas.card import ModelCard
from schemas.trajectory import TrajectoryView
from tests.replay.rollouts import GUIDED, LEVELS, Order, Rolled, Trajectory, both, roll

OneSample = Callable[..., tuple[TrajectoryView, Conditioning]]

WIDTH = 0.006
"""Of a step to either side, relative to the parameter's norm: at 0.03 curvature shows, at 0.001 rounding."""
TOLERANCE = 0.01
"""Of the quotient, relative to the derivative; 0.004 is the most that was seen, 0.0001 is common."""
SOME_PARAMETERS = (
    "proj_in.weight",
    "audio_proj_in.weight",
    "transformer_blocks.0.attn1.to_q.weight",
    "transformer_blocks.0.audio_attn2.to_k.weight",
    "transformer_blocks.0.audio_to_video_attn.to_v.weight",
    "transformer_blocks.0.video_to_audio_attn.to_out.0.weight",
    "transformer_blocks.0.attn2.to_out.0.bias",
)
"""Of both branches, of what joins them and of what reads the text; each moves both log-probs."""


@pytest.fixture
def trained() -> LTX2VideoTransformer3DModel:
    return load("tiny", "transformer").requires_grad_(True)


def relative_errors(
    transformer: LTX2VideoTransformer3DModel,
    score: Callable[[], Tensor],
    names: Sequence[str],
    *,
    differentiated: Callable[[], Tensor] | None = None,
) -> dict[str, float]:
    """Per parameter: how far the derivative of ``score`` along its gradient is from the central difference quotient.

    ``differentiated`` gives the gradients in place of ``score``, to show that a wrong one is found out.
    """
    parameters = {name: transformer.get_parameter(name) for name in names}
    gradients = torch.autograd.grad((differentiated or score)(), list(parameters.values()))
    errors = {}
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        assert gradient is not None, name
        slope = gradient.norm()
        quotient = quotient_along(parameter, gradient / slope, score)
        errors[name] = abs(slope.item() - quotient) / slope.item()
    return errors


@torch.no_grad()
def quotient_along(parameter: Tensor, direction: Tensor, score: Callable[[], Tensor]) -> float:
    """The derivative of ``score`` along a unit vector, from central difference quotients of two widths, which together
    are free of the log-prob's third derivative (Richardson's extrapolation)."""
    kept = parameter.clone()

    def at(width: float) -> float:
        parameter.copy_(kept + width * direction)
        return score().double().item()

    width = WIDTH * kept.norm().item()
    narrow, wide = ((at(w) - at(-w)) / (2 * w) for w in (width, 2 * width))
    parameter.copy_(kept)
    return (4 * narrow - wide) / 3


@contextmanager
def without_gradient_of_row(transformer: LTX2VideoTransformer3DModel, row: int) -> Iterator[None]:
    """Every forward pass gives the same velocities, but those of one row carry no gradient."""

    def cut(module: Any, args: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.cat([o[:row], o[row : row + 1].detach(), o[row + 1 :]]) for o in outputs)

    hook = transformer.register_forward_hook(cut)
    try:
        yield
    finally:
        hook.remove()


def scores(
    transformer: LTX2VideoTransformer3DModel, view: TrajectoryView, conditioning: Conditioning, step: int
) -> dict[Modality, Callable[[], Tensor]]:
    """Per modality: its log-prob of the step, under the weights at the time of the call."""

    def score(modality: Modality) -> Tensor:
        (scored,) = log_probs(transformer, view, conditioning, [step])
        value = getattr(scored, modality)
        assert value is not None
        return value

    return {modality: lambda modality=modality: score(modality) for modality in MODALITIES}


# Against finite differences


@pytest.mark.parametrize("modality", MODALITIES)
@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
@pytest.mark.parametrize("kind", LEVELS)
def test_gradients_are_those_of_the_log_prob_by_finite_differences(
    kind: str,
    guided: bool,
    modality: Modality,
    mixed: dict[tuple[str, bool], list[Rolled]],
    trained: LTX2VideoTransformer3DModel,
) -> None:
    rolled = mixed[kind, guided][1]
    score = scores(trained, rolled.view, rolled.conditioning, 2)[modality]
    errors = relative_errors(trained, score, SOME_PARAMETERS)
    assert {name: error for name, error in errors.items() if error > TOLERANCE} == {}


def test_so_they_are_for_the_squared_error(
    one_sample: OneSample, trained: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(transition=both("cps", log_prob_kind="squared_error"))
    score = scores(trained, view, conditioning, 1)["video"]
    assert max(relative_errors(trained, score, SOME_PARAMETERS[:4]).values()) < TOLERANCE


def test_the_check_finds_a_guided_gradient_that_misses_the_negative_row(
    one_sample: OneSample, trained: LTX2VideoTransformer3DModel
) -> None:
    view, conditioning = one_sample(**GUIDED)
    place = view.manifest["places"][2]["negative"]
    score = scores(trained, view, conditioning, 2)["video"]

    def cut() -> Tensor:
        with without_gradient_of_row(trained, place["index"]):
            return score()

    assert cut().item() == score().item()
    errors = relative_errors(trained, score, SOME_PARAMETERS[:4], differentiated=cut)
    assert min(errors.values()) > 10 * TOLERANCE


def test_the_check_finds_a_gradient_of_the_other_modality(
    one_sample: OneSample, trained: LTX2VideoTransformer3DModel
) -> None:
    score = scores(trained, *one_sample(), 2)
    errors = relative_errors(trained, score["video"], SOME_PARAMETERS[:4], differentiated=score["audio"])
    assert min(errors.values()) > 10 * TOLERANCE


# Where they reach


@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
def test_gradients_flow_to_every_parameter_and_are_finite(
    guided: bool, mixed: dict[tuple[str, bool], list[Rolled]], trained: LTX2VideoTransformer3DModel
) -> None:
    rolled = mixed["sde", guided][0]
    scored = log_probs(trained, rolled.view, rolled.conditioning, steps=[0, 3])
    total = sum(getattr(one, modality) for one in scored for modality in MODALITIES)
    total.backward()
    grads = {name: parameter.grad for name, parameter in trained.named_parameters()}
    assert [name for name, grad in grads.items() if grad is None] == []
    assert all(torch.isfinite(grad).all() for grad in grads.values())
    assert [name for name, grad in grads.items() if not grad.any()] == []


def test_each_modalitys_log_prob_reaches_the_other_modalitys_branch(
    trainable: LTX2VideoTransformer3DModel, one_sample: OneSample
) -> None:
    """Both attend to each other, so replay must feed both stored states to both."""
    view, conditioning = one_sample()
    (scored,) = log_probs(trainable, view, conditioning, steps=[2])
    for log_prob, weight in (
        (scored.video, trainable.audio_proj_in.weight),
        (scored.audio, trainable.proj_in.weight),
    ):
        (grad,) = torch.autograd.grad(log_prob, weight, retain_graph=True)
        assert grad.abs().max() > 0


def test_gradient_checkpointing_changes_no_bit(
    trained: LTX2VideoTransformer3DModel, card: ModelCard, order: Order, trajectory: Trajectory
) -> None:
    """It is how a trainer fits the rollout's pass into its memory and keeps a ratio of exactly 1."""
    (rolled,) = roll(trained, card, trajectory, order())

    def scored() -> tuple[float, Tensor]:
        (one,) = log_probs(trained, rolled.view, rolled.conditioning, [2])
        (grad,) = torch.autograd.grad(one.video, trained.proj_in.weight)
        return one.video.item(), grad

    plain = scored()
    trained.enable_gradient_checkpointing()
    checkpointed = scored()
    assert plain[0] == checkpointed[0] == rolled.view.manifest["log_probs_video"][2]
    assert torch.equal(plain[1], checkpointed[1])
