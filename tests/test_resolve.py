"""What a request becomes for a checkpoint, and what no checkpoint of this card can sample."""

import json
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from schemas.errors import Problem
from schemas.request import RolloutRequest
from schemas.resolve import (
    ResolvedRequest,
    StepLists,
    check,
    geometry_of,
    media_bytes,
    needs_negative_prompt,
    num_rows,
    resolve,
    trajectory_bytes,
)
from tests.cards import ltx23_card

CARD = ltx23_card()
ODE = {"kind": "ode"}
CPS = {"kind": "cps"}


def _resolved(**fields: Any) -> ResolvedRequest:
    return resolve({"prompt": "a cat", **fields}, CARD)


def _problem(**fields: Any) -> Problem:
    card = fields.pop("card", CARD)
    with pytest.raises(ValueError, match="invalid_request") as caught:
        resolve({"prompt": "a cat", **fields}, card)
    problem = Problem.of(caught.value)
    assert problem is not None
    return problem


def test_a_bare_prompt_gets_the_cards_defaults() -> None:
    resolved = resolve({"prompt": "  a cat\n"}, CARD)
    assert resolved.model_dump(exclude={"seed", "request_id"}) == {
        "prompt": "a cat",
        "negative_prompt": None,
        "mode": "rollout",
        "num_samples": 1,
        "height": 64,
        "width": 96,
        "num_frames": 9,
        "frame_rate": 24.0,
        "num_inference_steps": 6,
        "sigmas": None,
        "sigma_shift": "constant",
        "guidance": {"video": 1.0, "audio": 1.0},
        "guider": None,
        "transition": {
            "video": {"kind": "sde", "noise_level": 0.7, "log_prob_kind": "density"},
            "audio": {"kind": "sde", "noise_level": 0.7, "log_prob_kind": "density"},
        },
        "stochastic_steps": {"video": (0, 1, 2, 3, 4, 5), "audio": (0, 1, 2, 3, 4, 5)},
        "shared_initial_noise": False,
        "shared_prefix": False,
        "return_steps": (0, 1, 2, 3, 4, 5, 6),
        "state_dtype": "float32",
        "trajectory": True,
        "media": True,
        "min_policy_version": 0,
        "allow_mixed_versions": False,
        "metadata": None,
        "deadline_s": 600.0,
    }


def test_the_seed_and_the_request_id_are_drawn_anew_where_none_is_given() -> None:
    first, second = _resolved(), _resolved()
    assert first.seed != second.seed
    assert first.request_id != second.request_id
    assert 0 <= first.seed < 2**31
    assert _resolved(seed=0).seed == 0


def test_generate_resolves_to_diffusers_defaults() -> None:
    resolved = _resolved(mode="generate")
    assert resolved.guider is not None
    assert resolved.guider.model_dump() == {
        "guidance_scale": 3.0,
        "stg_scale": 1.0,
        "modality_scale": 3.0,
        "guidance_rescale": 0.7,
        "audio_guidance_scale": 7.0,
        "audio_stg_scale": 1.0,
        "audio_modality_scale": 3.0,
        "audio_guidance_rescale": 0.7,
        "spatio_temporal_guidance_blocks": (28,),
    }
    assert resolved.sigma_shift == "tokens"
    assert (resolved.transition.video.kind, resolved.transition.audio.kind) == ("ode", "ode")
    assert resolved.stochastic_steps == StepLists(video=(), audio=())
    assert resolved.return_steps == (6,)
    assert resolved.negative_prompt == ""
    assert num_rows(resolved) == 2


def test_an_audio_value_of_0_or_none_means_the_videos() -> None:
    guider = {"guidance_scale": 2.0, "audio_guidance_scale": 0, "stg_scale": 0.5, "audio_stg_scale": None}
    resolved = _resolved(mode="generate", guider=guider)
    assert resolved.guider is not None
    assert (resolved.guider.audio_guidance_scale, resolved.guider.audio_stg_scale) == (2.0, 0.5)


def test_a_small_checkpoint_perturbs_its_last_block() -> None:
    resolved = resolve({"prompt": "a", "mode": "generate"}, ltx23_card(num_layers=2))
    assert resolved.guider is not None
    assert resolved.guider.spatio_temporal_guidance_blocks == (1,)


def test_a_negative_prompt_is_there_exactly_where_guidance_needs_it() -> None:
    assert _resolved().negative_prompt is None
    assert _resolved(guidance={"audio": 3.0}).negative_prompt == ""
    assert _resolved(guidance={"video": 3.0}, negative_prompt=" blurry ").negative_prompt == "blurry"
    off = {"guidance_scale": 1.0, "audio_guidance_scale": None}
    assert _resolved(mode="generate", guider=off).negative_prompt is None
    assert _problem(negative_prompt="blurry").remedy == "set guidance above 1 or leave negative_prompt out"


def test_cps_leaves_the_last_step_out_unless_it_is_named() -> None:
    resolved = _resolved(transition={"video": CPS})
    assert resolved.stochastic_steps == StepLists(video=(0, 1, 2, 3, 4), audio=(0, 1, 2, 3, 4, 5))
    problem = _problem(transition={"video": CPS}, stochastic_steps=[5, 0])
    assert (problem.field, problem.value) == ("stochastic_steps", 5)
    assert "the last step, 5, for video" in problem.rule


def test_a_deterministic_modality_has_no_stochastic_steps() -> None:
    resolved = _resolved(transition={"audio": ODE}, stochastic_steps=[2, 1])
    assert resolved.stochastic_steps == StepLists(video=(1, 2), audio=())
    quiet = {"video": ODE, "audio": {"noise_level": 0}}
    assert _resolved(transition=quiet).stochastic_steps == StepLists(video=(), audio=())
    assert _resolved(transition=quiet, stochastic_steps=[]).stochastic_steps == StepLists(video=(), audio=())
    assert _problem(transition=quiet, stochastic_steps=[1]).field == "stochastic_steps"


def test_an_empty_list_of_stochastic_steps_means_none() -> None:
    assert _resolved(stochastic_steps=[]).stochastic_steps == StepLists(video=(), audio=())


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
    assert _resolved(**fields).return_steps == kept


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
    problem = _problem(**fields)
    assert (problem.field, problem.remedy) == (field, remedy)


def test_a_card_may_allow_fewer_state_dtypes_and_less_metadata() -> None:
    card = ltx23_card(limits={"state_dtypes": ["float32", "bfloat16"], "max_metadata_bytes": 10})
    assert _problem(state_dtype="float16", card=card).remedy == "use float32 or bfloat16"
    assert _problem(metadata={"a": "long enough"}, card=card).field == "metadata"
    assert resolve({"prompt": "a", "state_dtype": "bfloat16"}, card).state_dtype == "bfloat16"


def test_one_step_is_possible_where_the_grid_may_end_anywhere() -> None:
    assert _resolved(sigmas=[1.0]).num_inference_steps == 1
    unstretched = ltx23_card(scheduler={"shift_terminal": None})
    assert resolve({"prompt": "a", "num_inference_steps": 1}, unstretched).return_steps == (0, 1)


def test_sde_is_refused_where_its_noise_has_no_bound() -> None:
    sigmas = [1.0, 0.999999, 0.5]
    problem = _problem(sigmas=sigmas)
    assert (problem.field, problem.value) == ("sigmas.1", 0.999999)
    assert _resolved(sigmas=sigmas, stochastic_steps=[2]).stochastic_steps.video == (2,)
    assert _resolved(sigmas=sigmas, transition={"video": CPS, "audio": {"kind": "dance"}}).sigmas == tuple(
        sigmas
    )
    assert _resolved(sigmas=[0.99999994, 0.995, 0.5]).num_inference_steps == 3


def test_a_sigma_too_small_for_a_density_is_refused_where_the_step_is_stochastic() -> None:
    sigmas = [1.0, 0.5, 1e-9]
    assert _problem(sigmas=sigmas).field == "sigmas.2"
    assert _problem(sigmas=sigmas, transition={"video": CPS, "audio": CPS}).field == "sigmas.2"
    assert _resolved(sigmas=sigmas, stochastic_steps=[0]).stochastic_steps.video == (0,)


def test_a_resolved_request_resolves_to_itself() -> None:
    for fields in (
        {},
        {"mode": "generate"},
        {"sigmas": [1.0, 0.4], "guidance": {"video": 2}, "metadata": {"a": 0.1}},
    ):
        resolved = _resolved(**fields)
        assert resolve(resolved, CARD) == resolved
        assert resolve(resolved.model_dump(), CARD) == resolved
        assert resolve(json.loads(resolved.model_dump_json()), CARD) == resolved


def test_a_resolved_request_that_was_tampered_with_is_refused() -> None:
    good = _resolved(transition={"video": ODE}).model_dump()
    for change, field in (
        ({"stochastic_steps": {"video": [1], "audio": []}}, "stochastic_steps"),
        ({"stochastic_steps": {"video": [], "audio": [2, 1]}}, "stochastic_steps"),
        ({"return_steps": [0]}, "return_steps"),
        ({"negative_prompt": "blurry"}, "negative_prompt"),
        ({"mode": "generate"}, "guider"),
        ({"num_samples": 65}, "num_samples"),
    ):
        with pytest.raises(ValueError, match="invalid_request") as caught:
            resolve({**good, **change}, CARD)
        problem = Problem.of(caught.value)
        assert problem is not None
        assert problem.field == field


def test_another_card_may_refuse_what_was_resolved() -> None:
    resolved = _resolved(num_samples=8)
    check(resolved, CARD)
    with pytest.raises(ValueError, match="num_samples"):
        check(resolved, ltx23_card(limits={"max_num_samples": 4}))


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


def _some(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


_TRANSITION = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["sde", "cps", "dance", "ode"]),
        "noise_level": st.sampled_from([0, 0.3, 0.7, 1.0, 1.5, -1.0]),
        "log_prob_kind": st.sampled_from(["density", "squared_error"]),
    },
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_STEPS = st.lists(st.integers(-1, 12), max_size=4)
_REQUESTS = st.fixed_dictionaries(
    {"prompt": st.text(max_size=10).map(lambda text: text + "a") | st.text(max_size=3)},
    optional={
        "negative_prompt": _some(st.text(max_size=5)),
        "mode": st.sampled_from(["rollout", "rollout", "generate"]),
        "num_samples": st.integers(0, 70),
        "seed": _some(st.integers(-1, 2**63)),
        "height": _some(st.sampled_from([0, 32, 64, 100, 3200])),
        "num_frames": _some(st.sampled_from([1, 9, 17, 20, 121])),
        "frame_rate": _some(st.floats(0.5, 120)),
        "num_inference_steps": _some(st.integers(0, 12)),
        "sigmas": _some(
            st.lists(st.floats(0, 1.01), max_size=12).map(lambda values: sorted(values, reverse=True))
        ),
        "sigma_shift": st.sampled_from([None, "constant", "tokens"]),
        "guidance": _some(st.fixed_dictionaries({"video": st.floats(0.5, 8)})),
        "guider": _some(st.fixed_dictionaries({}, optional={"guidance_scale": st.floats(0, 8)})),
        "transition": _some(st.fixed_dictionaries({}, optional={"video": _TRANSITION, "audio": _TRANSITION})),
        "stochastic_steps": _some(_STEPS),
        "return_steps": st.sampled_from(["transitions", "all"]) | _STEPS,
        "state_dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
        "trajectory": st.booleans(),
        "media": st.booleans(),
        "metadata": _some(st.dictionaries(st.text(), _JSON, max_size=3)),
        "deadline_s": _some(st.floats(0, 4000)),
    },
)


_GENERATIONS = st.fixed_dictionaries(
    {"prompt": st.just("a cat"), "mode": st.just("generate")},
    optional={
        "negative_prompt": st.text(max_size=5),
        "num_inference_steps": st.integers(1, 12),
        "guider": st.fixed_dictionaries(
            {},
            optional={
                "guidance_scale": st.floats(0, 8),
                "audio_guidance_scale": _some(st.floats(0, 8)),
                "stg_scale": st.floats(0, 2),
                "spatio_temporal_guidance_blocks": _some(st.lists(st.integers(0, 50), max_size=3)),
            },
        ),
    },
)


@settings(max_examples=400)
@given(_REQUESTS | _GENERATIONS)
def test_any_request_is_either_refused_by_name_or_holds_every_invariant(fields: dict[str, Any]) -> None:
    try:
        resolved = resolve(fields, CARD)
    except ValueError as error:
        problem = Problem.of(error)
        assert problem is not None
        assert problem.code == "invalid_request"
        assert problem.field is not None
        assert problem.field.split(".")[0] in RolloutRequest.model_fields
        event(f"refused: {problem.field.split('.')[0]}")
        return
    event(f"resolved: {resolved.mode}")
    text = resolved.model_dump_json()
    assert ResolvedRequest.model_validate_json(text) == resolved
    assert ResolvedRequest.model_validate_json(text).model_dump_json() == text
    assert resolve(json.loads(text), CARD) == resolved
    _holds_every_invariant(resolved)


def _holds_every_invariant(resolved: ResolvedRequest) -> None:
    last = resolved.num_inference_steps
    for modality in ("video", "audio"):
        steps = getattr(resolved.stochastic_steps, modality)
        transition = getattr(resolved.transition, modality)
        assert list(steps) == sorted(set(steps))
        assert set(steps) <= set(range(last - 1 if transition.kind == "cps" else last))
        assert not steps or transition.is_stochastic
    kept = resolved.return_steps
    assert list(kept) == sorted(set(kept))
    assert set(kept) <= set(range(last + 1))
    assert kept[-1] == last
    assert resolved.sigmas is None or len(resolved.sigmas) == last
    assert (
        (resolved.negative_prompt is not None) == needs_negative_prompt(resolved) == (num_rows(resolved) == 2)
    )
    assert (resolved.guider is not None) == (resolved.mode == "generate")
    assert resolved.prompt == resolved.prompt.strip() != ""
    sizes = geometry_of(resolved, CARD)
    assert trajectory_bytes(resolved, CARD) >= len(kept) * sizes.num_video_tokens * sizes.video_channels * 2
    assert (media_bytes(resolved, CARD) > 0) == resolved.media
