"""SGLang's request fields: each reads here as it does there, or is refused by its own name."""

import re
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import Problem
from schemas.request import RolloutRequest
from schemas.resolve import resolve
from schemas.sglang import FIELD_NAMES, WITHOUT_EFFECT, SGLangRequest, in_their_words, rollout_request_of
from schemas.sglang_answer import answer_of
from tests.cards import ltx23_card
from tests.sglang_tables import tables

DEFAULTS_OF_THAT_SERVER = {
    "prompt": "a red ball",
    "negative_prompt": None,
    "seed": None,
    "generator_device": "cuda",
    "width": None,
    "height": None,
    "num_inference_steps": None,
    "num_outputs_per_prompt": None,
    "guidance_scale": None,
    "true_cfg_scale": None,
    "num_frames": None,
    "fps": None,
    "rollout": True,
    "rollout_sde_type": "sde",
    "rollout_noise_level": 0.7,
    "rollout_log_prob_no_const": False,
    "rollout_return_denoising_env": False,
    "rollout_return_dit_trajectory": False,
    "rollout_sde_step_indices": None,
    "rollout_return_step_indices": None,
    "image_path": None,
    "suppress_logs": False,
    "extra_sampling_params": None,
}
"""All but rollout_debug_mode, whose default there is to ship what is not kept here."""


def translated(**fields: Any) -> dict[str, Any]:
    return rollout_request_of(SGLangRequest.of({"prompt": "a red ball", **fields}))


def refusal(**fields: Any) -> Problem:
    with pytest.raises(ValueError) as caught:
        translated(**fields)
    problem = Problem.of(caught.value)
    assert problem is not None and problem.rule
    return problem


def resolved(**fields: Any) -> Any:
    return resolve(translated(**fields), ltx23_card())


def test_every_field_at_its_default_is_taken() -> None:
    assert translated(**DEFAULTS_OF_THAT_SERVER) == translated()
    assert set(SGLangRequest.model_fields) - set(DEFAULTS_OF_THAT_SERVER) == {
        "rollout_debug_mode",
        "rollout_audio_sde_type",
        "rollout_audio_noise_level",
    }


def test_what_is_left_out_is_sampled_as_that_server_means_it() -> None:
    request = resolved()
    assert request.num_samples == 1 and request.seed >= 0
    assert (request.guidance.video, request.guidance.audio, request.negative_prompt) == (1.0, 1.0, None)
    assert (request.transition.video.kind, request.transition.video.noise_level) == ("sde", 0.7)
    assert request.transition.video.log_prob_kind == "density"
    assert request.transition.audio.kind == "ode"
    assert request.stochastic_steps.video == tuple(range(6)) and request.stochastic_steps.audio == ()
    assert (request.sigma_shift, request.state_dtype) == ("constant", "float32")
    assert (request.trajectory, request.media) == (False, True)


def test_what_is_given_arrives() -> None:
    request = resolved(
        negative_prompt="blurry",
        seed=11,
        width=96,
        height=64,
        num_inference_steps=5,
        num_outputs_per_prompt=3,
        guidance_scale=2.5,
        num_frames=17,
        fps=25,
        rollout_sde_type="cps",
        rollout_noise_level=0.9,
        rollout_log_prob_no_const=True,
        rollout_return_dit_trajectory=True,
        rollout_sde_step_indices=[1, 3],
        rollout_return_step_indices=[1, 2, 5],
        rollout_audio_sde_type="sde",
        rollout_audio_noise_level=0.3,
    )
    assert (request.negative_prompt, request.seed, request.num_samples) == ("blurry", 11, 3)
    assert (request.width, request.height, request.num_frames, request.frame_rate) == (96, 64, 17, 25)
    assert (request.guidance.video, request.guidance.audio) == (2.5, 2.5)
    video, audio = request.transition.video, request.transition.audio
    assert (video.kind, video.noise_level, video.log_prob_kind) == ("cps", 0.9, "squared_error")
    assert (audio.kind, audio.noise_level, audio.log_prob_kind) == ("sde", 0.3, "squared_error")
    assert request.stochastic_steps.video == request.stochastic_steps.audio == (1, 3)
    assert request.return_steps == (1, 2, 5) and request.trajectory


def test_all_states_are_returned_where_none_are_named() -> None:
    assert resolved(rollout_return_dit_trajectory=True).return_steps == tuple(range(7))


def test_no_steps_are_no_stochastic_steps() -> None:
    assert resolved(rollout_sde_step_indices=[]).stochastic_steps.video == ()


def test_ode_needs_no_noise_level_and_cps_leaves_its_last_step_out() -> None:
    assert resolved(rollout_sde_type="ode").transition.video.noise_level == 0
    assert resolved(rollout_sde_type="cps").stochastic_steps.video == tuple(range(5))
    assert resolved(rollout_noise_level=0).stochastic_steps.video == ()


def test_an_evaluation_is_what_a_user_would_watch() -> None:
    request = resolved(
        rollout=False, negative_prompt="blurry", rollout_sde_type="cps", num_outputs_per_prompt=2
    )
    assert (request.mode, request.num_samples, request.negative_prompt) == ("generate", 2, "blurry")
    assert request.guider.guidance_scale == 3.0 and request.guider.audio_guidance_scale == 7.0
    assert request.sigma_shift == "constant" and not request.trajectory


def test_a_negative_prompt_without_guidance_has_no_effect_as_there() -> None:
    assert "negative_prompt" not in translated(negative_prompt="blurry", guidance_scale=1.0)
    assert "negative_prompt" in WITHOUT_EFFECT


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"prompt": " "}, "prompt", "empty"),
        ({"prompts": ["a"]}, "prompts", "did you mean prompt"),
        ({"rollout_noise_lvl": 0.7}, "rollout_noise_lvl", "did you mean rollout_noise_level"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"num_frames": 0}, "num_frames", "at least 1"),
        ({"rollout_sde_type": "flow"}, "rollout_sde_type", "'sde'"),
        ({"rollout_noise_level": -0.1}, "rollout_noise_level", "at least 0"),
        ({"rollout_noise_level": 2, "rollout_sde_type": "cps"}, "rollout_noise_level", "at most 1 for cps"),
        (
            {"rollout_audio_sde_type": "cps", "rollout_audio_noise_level": 2},
            "rollout_audio_noise_level",
            "cps",
        ),
        ({"guidance_scale": 0.5}, "guidance_scale", "at least 1"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "finite"),
        ({"negative_prompt": "blurry"}, "guidance_scale", "required with negative_prompt"),
        ({"true_cfg_scale": 4.0}, "true_cfg_scale", "use guidance_scale"),
        ({"rollout_debug_mode": True}, "rollout_debug_mode", "not kept"),
        ({"image_path": ["cat.png"]}, "image_path", "prompt and noise alone"),
        ({"image_path": "cat.png"}, "image_path", "prompt and noise alone"),
        (
            {"extra_sampling_params": {"quality": "lossless"}},
            "extra_sampling_params.quality",
            "not supported",
        ),
        ({"extra_sampling_params": {"generate_audio": False}}, "extra_sampling_params.generate_audio", "not"),
        ({"rollout": False, "guidance_scale": 3.0}, "guidance_scale", "guider"),
        (
            {"rollout_return_step_indices": [0]},
            "rollout_return_step_indices",
            "rollout_return_dit_trajectory",
        ),
        ({"rollout_sde_step_indices": [1, 1]}, "rollout_sde_step_indices.1", "before"),
        ({"generator_device": "tpu"}, "generator_device", "'cuda' or 'cpu'"),
        ({"fps": 0}, "fps", "greater than 0"),
    ],
)
def test_what_means_something_else_here_is_refused_by_its_name(
    fields: dict[str, Any], field: str, said: str
) -> None:
    problem = refusal(**fields)
    assert problem.code == "invalid_request" and problem.field == field
    assert said in f"{problem.rule} {problem.remedy}"


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"num_frames": 120}, "num_frames", "8k + 1"),
        ({"num_outputs_per_prompt": 65}, "num_outputs_per_prompt", "at most 64"),
        ({"rollout_sde_step_indices": [9]}, "rollout_sde_step_indices", "from 0 to 5"),
        (
            {"rollout_sde_type": "cps", "rollout_sde_step_indices": [5]},
            "rollout_sde_step_indices",
            "leave 5 out",
        ),
        (
            {"rollout_return_step_indices": [7], "rollout_return_dit_trajectory": True},
            "rollout_return_step_indices",
            "from 0 to 6",
        ),
        (
            {"rollout_sde_type": "ode", "rollout_sde_step_indices": [1]},
            "rollout_sde_step_indices",
            "deterministic",
        ),
    ],
)
def test_what_the_checkpoint_refuses_is_told_by_its_name(
    fields: dict[str, Any], field: str, said: str
) -> None:
    request = translated(**fields)
    with pytest.raises(ValueError) as caught:
        resolve(request, ltx23_card())
    problem = Problem.of(in_their_words(caught.value))
    assert problem is not None and (problem.field or "").startswith(field)
    assert said in f"{problem.rule} {problem.remedy}"
    named = {name for name in FIELD_NAMES if "." not in name and name not in ("guidance",)}
    assert not any(name in f"{problem.rule} {problem.remedy}".split() for name in named)


def test_a_translated_request_is_one_of_ours() -> None:
    assert RolloutRequest.of(translated(seed=3, rollout_return_dit_trajectory=True)).seed == 3


@pytest.mark.parametrize("given", [None, [], "a red ball", 3])
def test_what_is_no_object_is_refused(given: object) -> None:
    with pytest.raises(ValueError) as caught:
        SGLangRequest.of(given)
    assert "object" in str(caught.value)


def cells_of(header: str) -> set[str]:
    """Names in code in the first column of a table of the page."""
    page = (Path(__file__).parents[1] / "docs" / "sglang.md").read_text()
    rows = page.split(header, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_page_says_of_every_field_how_it_reads_and_what_is_answered() -> None:
    assert cells_of("| field | default | here |") == set(SGLangRequest.model_fields)
    made = tables()
    answer = answer_of(
        SGLangRequest.of({"prompt": "a"}),
        request_id="a",
        media=made.media,
        trajectory=None,
        conditioning=None,
    )
    assert cells_of("| field | |") == set(answer)
