"""Which steps are stochastic, which states are kept, and how many bytes they and the media take."""

from typing import Any

import pytest

from schemas.resolve import StepLists, media_bytes, resolve, trajectory_bytes
from tests.cards import ltx23_card
from tests.resolving import CPS, ODE, problem_of, resolved_of


def test_cps_leaves_the_last_step_out_unless_it_is_named() -> None:
    resolved = resolved_of(transition={"video": CPS})
    assert resolved.stochastic_steps == StepLists(video=(0, 1, 2, 3, 4), audio=(0, 1, 2, 3, 4, 5))
    problem = problem_of(transition={"video": CPS}, stochastic_steps=[5, 0])
    assert (problem.field, problem.value) == ("stochastic_steps", 5)
    assert "the last step, 5, for video" in problem.rule


def test_a_deterministic_modality_has_no_stochastic_steps() -> None:
    resolved = resolved_of(transition={"audio": ODE}, stochastic_steps=[2, 1])
    assert resolved.stochastic_steps == StepLists(video=(1, 2), audio=())
    quiet = {"video": ODE, "audio": {"noise_level": 0}}
    assert resolved_of(transition=quiet).stochastic_steps == StepLists(video=(), audio=())
    assert resolved_of(transition=quiet, stochastic_steps=[]).stochastic_steps == StepLists(
        video=(), audio=()
    )
    assert problem_of(transition=quiet, stochastic_steps=[1]).field == "stochastic_steps"


def test_an_empty_list_of_stochastic_steps_means_none() -> None:
    assert resolved_of(stochastic_steps=[]).stochastic_steps == StepLists(video=(), audio=())


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"stochastic_steps": [3, 1]}, (1, 2, 3, 4, 6)),
        ({"stochastic_steps": [5]}, (5, 6)),
        ({"stochastic_steps": [2], "return_steps": "all"}, (0, 1, 2, 3, 4, 5, 6)),
        ({"return_steps": [4, 0]}, (0, 4, 6)),
        ({"return_steps": []}, (6,)),
        ({"trajectory": False}, (6,)),
        ({"transition": {"video": ODE, "audio": ODE}}, (6,)),
        ({"sigmas": [1.0, 0.5]}, (0, 1, 2)),
    ],
)
def test_the_last_state_is_kept_with_those_asked_for(fields: dict[str, Any], kept: tuple[int, ...]) -> None:
    assert resolved_of(**fields).return_steps == kept


def test_bytes_are_those_of_the_states_and_the_media() -> None:
    card = ltx23_card(limits={"max_video_tokens": 6144})
    whole = {"prompt": "a", "height": 512, "width": 768, "num_frames": 121, "num_inference_steps": 30}
    every = resolve(whole, card)
    state = 6144 * 128 + 126 * 128
    assert trajectory_bytes(every, card) == 31 * (state * 4 + 16)
    three = resolve({**whole, "stochastic_steps": [0, 10, 20], "state_dtype": "bfloat16"}, card)
    assert trajectory_bytes(three, card) == 7 * (state * 2 + 16)
    assert media_bytes(every, card) == 121 * 512 * 768 * 3 + 126 * 4 * 160 * 3 * 2 * 4
    assert media_bytes(resolve({**whole, "media": False}, card), card) == 0
