"""Any request that hypothesis thinks of is refused by name, or resolves to what holds every invariant."""

import json
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from schemas.errors import Problem
from schemas.request import RolloutRequest
from schemas.resolve import (
    ResolvedRequest,
    geometry_of,
    media_bytes,
    needs_negative_prompt,
    num_rows,
    resolve,
    trajectory_bytes,
)
from tests.resolving import CARD


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
