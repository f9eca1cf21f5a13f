"""The rules of a request that need no checkpoint."""

import json
import math
from typing import Any

import numpy as np
import pytest

from schemas.errors import Problem
from schemas.request import RolloutRequest

DEEP: dict[str, Any] = {}
for _ in range(3000):
    DEEP = {"a": DEEP}

ODE = {"kind": "ode"}


def _request(**fields: Any) -> RolloutRequest:
    return RolloutRequest.of({"prompt": "a cat", **fields})


def _problem(**fields: Any) -> Problem:
    with pytest.raises(ValueError, match="invalid_request") as caught:
        _request(**fields)
    problem = Problem.of(caught.value)
    assert problem is not None
    return problem


def test_only_the_prompt_is_required() -> None:
    request = RolloutRequest(prompt="a cat")
    assert (request.mode, request.num_samples, request.trajectory, request.media) == (
        "rollout",
        1,
        True,
        True,
    )
    assert RolloutRequest.of(request) is request


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mode": "generate", "guider": {"stg_scale": 0}},
        {"guidance": {"video": 3}, "negative_prompt": "", "transition": {"audio": ODE}},
        {"sigmas": [1, 0.5], "stochastic_steps": [1, 0], "return_steps": [2]},
        {"metadata": {"a": [1, None, {"b": "ü"}]}, "request_id": "a.b-c_1", "seed": 2**63 - 1},
        {"request_id": "-_.."},
    ],
)
def test_a_request_survives_its_dump_and_its_json(fields: dict[str, Any]) -> None:
    request = _request(**fields)
    assert RolloutRequest.model_validate(request.model_dump()) == request
    assert RolloutRequest.model_validate_json(request.model_dump_json()) == request
    assert RolloutRequest.of(json.loads(request.model_dump_json())) == request


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": " \n"}, "prompt"),
        ({"prompt": "a\0b"}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"negative_prompt": "a\0b"}, "negative_prompt"),
        ({"mode": "eval"}, "mode"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": True}, "num_samples"),
        ({"num_samples": "4"}, "num_samples"),
        ({"num_samples": 4.5}, "num_samples"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"height": 2**40}, "height"),
        ({"frame_rate": 0}, "frame_rate"),
        ({"frame_rate": math.nan}, "frame_rate"),
        ({"frame_rate": 1e9}, "frame_rate"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"sigmas": []}, "sigmas"),
        ({"sigmas": "abc"}, "sigmas"),
        ({"sigmas": {1.0, 0.5}}, "sigmas"),
        ({"sigmas": [1.0, math.nan]}, "sigmas.1"),
        ({"sigmas": [1.1]}, "sigmas.0"),
        ({"sigmas": [1.0, 0.0]}, "sigmas.1"),
        ({"sigmas": [1.0, 1e-60]}, "sigmas.1"),
        ({"sigmas": [0.5, 0.6]}, "sigmas.1"),
        ({"sigmas": [0.5, 0.5 - 1e-12]}, "sigmas.1"),
        ({"sigmas": [1.0], "num_inference_steps": 1}, "num_inference_steps"),
        ({"sigmas": [1.0], "sigma_shift": "tokens"}, "sigma_shift"),
        ({"sigma_shift": "linear"}, "sigma_shift"),
        ({"guidance": {"video": 0.5}}, "guidance.video"),
        ({"guidance": {"audio": math.inf}}, "guidance.audio"),
        ({"guidance": 3.0}, "guidance"),
        ({"guider": {}}, "guider"),
        ({"mode": "generate", "guidance": {}}, "guidance"),
        ({"mode": "generate", "transition": {}}, "transition"),
        ({"mode": "generate", "stochastic_steps": []}, "stochastic_steps"),
        ({"mode": "generate", "guider": {"guidance_rescale": 1.5}}, "guider.guidance_rescale"),
        ({"negative_prompt": "blurry"}, "negative_prompt"),
        (
            {
                "negative_prompt": "blurry",
                "mode": "generate",
                "guider": {"guidance_scale": 1, "audio_guidance_scale": None},
            },
            "negative_prompt",
        ),
        ({"transition": {"video": {"kind": "cps", "noise_level": 1.1}}}, "transition.video.noise_level"),
        ({"transition": {"audio": {"kind": "ode", "noise_level": 0.7}}}, "transition.audio.noise_level"),
        ({"transition": {"audio": {"noise_level": -0.1}}}, "transition.audio.noise_level"),
        ({"transition": {"audio": {"noise_level": 1e-30}}}, "transition.audio.noise_level"),
        ({"transition": {"audio": {"noise_level": 1e30}}}, "transition.audio.noise_level"),
        ({"transition": {"audio": {"log_prob_kind": "none"}}}, "transition.audio.log_prob_kind"),
        ({"stochastic_steps": [-1]}, "stochastic_steps.0"),
        ({"stochastic_steps": [1, 2, 1]}, "stochastic_steps.2"),
        ({"stochastic_steps": [True]}, "stochastic_steps.0"),
        ({"return_steps": "some"}, "return_steps"),
        ({"return_steps": [-1]}, "return_steps.0"),
        ({"return_steps": [3, 3]}, "return_steps.1"),
        ({"return_steps": None}, "return_steps"),
        ({"state_dtype": "float64"}, "state_dtype"),
        ({"trajectory": 1}, "trajectory"),
        ({"trajectory": False, "media": False}, "trajectory"),
        ({"trajectory": False, "return_steps": "all"}, "return_steps"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "a\n"}, "request_id"),
        ({"request_id": "a" * 129}, "request_id"),
        ({"metadata": {"a": math.nan}}, "metadata"),
        ({"metadata": {"a": (1, 2)}}, "metadata"),
        ({"metadata": {1: 2}}, "metadata"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"metadata": {"a": object()}}, "metadata"),
        ({"metadata": {"a": "x" * 4096}}, "metadata"),
        ({"metadata": DEEP}, "metadata"),
        ({"metadata": [1]}, "metadata"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    problem = _problem(**fields)
    assert problem.field == field
    assert problem.rule


@pytest.mark.parametrize(
    "name", ["image", "images", "image_path", "init_image", "conditions", "first_frame", "video"]
)
def test_image_inputs_get_an_answer_of_their_own(name: str) -> None:
    problem = _problem(**{name: "cat.png"})
    assert problem.field == name
    assert "image inputs cannot be sampled" in problem.rule


def test_an_unknown_field_is_refused() -> None:
    assert _problem(guidance_scale=3.0).field == "guidance_scale"
    assert _problem(noise=1).rule == "is not a known field"


@pytest.mark.parametrize("given", [None, 3, "a cat", [], RolloutRequest])
def test_what_is_no_request_at_all_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="must be a JSON object"):
        RolloutRequest.of(given)


def test_a_wrong_value_is_answered_with_the_nearest_right_one() -> None:
    assert _problem(num_samples=0).remedy == "use 1"
    assert _problem(num_samples=4.0).remedy == "use 4"
    assert _problem(guidance={"video": 0}).remedy == "use 1"
    assert _problem(transition={"video": {"kind": "cps", "noise_level": 2}}).remedy == "use 1"
    assert _problem(sigmas=[1, 0.5, 0]).remedy == "leave the terminal 0 out, it is added"


def test_ode_needs_no_noise_level() -> None:
    request = _request(transition={"video": ODE, "audio": {"kind": "ode", "noise_level": 0}})
    assert request.transition is not None
    assert request.transition.video == request.transition.audio
    assert request.transition.video.noise_level == 0
    assert not request.transition.video.is_stochastic


def test_noise_level_0_is_deterministic_for_any_kind() -> None:
    for kind in ("sde", "cps", "dance"):
        request = _request(transition={"video": {"kind": kind, "noise_level": 0}})
        assert request.transition is not None
        assert not request.transition.video.is_stochastic
        assert request.transition.audio.is_stochastic


def test_numpys_numbers_are_taken_for_the_numbers_they_are() -> None:
    request = _request(
        seed=np.int64(7),
        frame_rate=np.float32(24),
        sigmas=np.linspace(1, 0.1, 4, dtype=np.float32),
        stochastic_steps=np.array([2, 0]),
        return_steps=range(3),
    )
    assert (request.seed, request.frame_rate, request.stochastic_steps) == (7, 24.0, (2, 0))
    assert type(request.seed) is int
    assert request.sigmas is not None
    assert type(request.sigmas[0]) is float
    assert request.return_steps == (0, 1, 2)


def test_requests_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RolloutRequest(prompt="a cat").seed = 3
