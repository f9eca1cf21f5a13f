"""What no checkpoint of this card can sample is refused by its field, with what would do."""

from typing import Any

import pytest

from schemas.resolve import resolve
from tests.cards import ltx23_card
from tests.resolving import CPS, problem_of, resolved_of


@pytest.mark.parametrize(
    ("fields", "field", "remedy"),
    [
        ({"num_frames": 120}, "num_frames", "use 113 or 121"),
        ({"num_samples": 65}, "num_samples", "use 64, or several requests"),
        ({"num_inference_steps": 101}, "num_inference_steps", "use 100"),
        ({"sigmas": [1 - i / 200 for i in range(101)]}, "sigmas", "use 100"),
        ({"prompt": "x" * 1001}, "prompt", "shorten it"),
        ({"negative_prompt": "x" * 1001, "guidance": {"video": 2}}, "negative_prompt", "shorten it"),
        ({"deadline_s": 3601}, "deadline_s", "use 3600"),
        ({"stochastic_steps": [6]}, "stochastic_steps", "use 5"),
        ({"return_steps": [7]}, "return_steps", "use 6"),
        ({"sigmas": [1.0, 0.5], "stochastic_steps": [2]}, "stochastic_steps", "use 1"),
        ({"num_inference_steps": 1}, "num_inference_steps", "use 2, or sigmas [1.0]"),
        (
            {"mode": "generate", "guider": {"spatio_temporal_guidance_blocks": [3, 48]}},
            "guider.spatio_temporal_guidance_blocks",
            "use 47",
        ),
        (
            {"mode": "generate", "guider": {"spatio_temporal_guidance_blocks": []}},
            "guider.spatio_temporal_guidance_blocks",
            "leave it out, or set both stg scales to 0",
        ),
    ],
)
def test_what_the_card_does_not_allow_is_refused(fields: dict[str, Any], field: str, remedy: str) -> None:
    problem = problem_of(**fields)
    assert (problem.field, problem.remedy) == (field, remedy)


def test_a_card_may_allow_fewer_state_dtypes_and_less_metadata() -> None:
    card = ltx23_card(limits={"state_dtypes": ["float32", "bfloat16"], "max_metadata_bytes": 10})
    assert problem_of(state_dtype="float16", card=card).remedy == "use float32 or bfloat16"
    assert problem_of(metadata={"a": "long enough"}, card=card).field == "metadata"
    assert resolve({"prompt": "a", "state_dtype": "bfloat16"}, card).state_dtype == "bfloat16"


def test_one_step_is_possible_where_the_grid_may_end_anywhere() -> None:
    assert resolved_of(sigmas=[1.0]).num_inference_steps == 1
    unstretched = ltx23_card(scheduler={"shift_terminal": None})
    assert resolve({"prompt": "a", "num_inference_steps": 1}, unstretched).return_steps == (0, 1)


def test_sde_is_refused_where_its_noise_has_no_bound() -> None:
    sigmas = [1.0, 0.999999, 0.5]
    problem = problem_of(sigmas=sigmas)
    assert (problem.field, problem.value) == ("sigmas.1", 0.999999)
    assert resolved_of(sigmas=sigmas, stochastic_steps=[2]).stochastic_steps.video == (2,)
    assert resolved_of(sigmas=sigmas, transition={"video": CPS, "audio": {"kind": "dance"}}).sigmas == tuple(
        sigmas
    )
    assert resolved_of(sigmas=[0.99999994, 0.995, 0.5]).num_inference_steps == 3


def test_a_sigma_too_small_for_a_density_is_refused_where_the_step_is_stochastic() -> None:
    sigmas = [1.0, 0.5, 1e-9]
    assert problem_of(sigmas=sigmas).field == "sigmas.2"
    assert problem_of(sigmas=sigmas, transition={"video": CPS, "audio": CPS}).field == "sigmas.2"
    assert resolved_of(sigmas=sigmas, stochastic_steps=[0]).stochastic_steps.video == (0,)
