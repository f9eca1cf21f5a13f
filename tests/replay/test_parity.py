"""The parity probe: exactly 0 and 1 under the rollout's weights, and something else under others."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel

from pipeline.checkpoint import load
from pipeline.conditioning import Conditioning
from pipeline.parity import ParityGap, parity
from schemas.trajectory import TrajectoryView
from tests.replay.rollouts import GUIDED, Rolled, counted_passes

OneSample = Callable[..., tuple[TrajectoryView, Conditioning]]


@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
def test_under_the_rollouts_weights_every_ratio_is_exactly_1(
    guided: bool, mixed: dict[tuple[str, bool], list[Rolled]], transformer: LTX2VideoTransformer3DModel
) -> None:
    rolled = mixed["sde", guided][1]
    assert parity(transformer, rolled.view, rolled.conditioning) == [
        ParityGap(step=step, modality=modality, log_prob_difference=0.0, ratio=1.0)
        for step in range(6)
        for modality in ("video", "audio")
    ]


def test_under_other_weights_none_is(one_sample: OneSample) -> None:
    view, conditioning = one_sample(**GUIDED)
    moved = load("tiny", "transformer")
    with torch.no_grad():
        moved.proj_out.weight.add_(0.01)
        moved.audio_proj_out.weight.add_(0.01)
    gaps = parity(moved, view, conditioning)
    assert len(gaps) == 12
    for gap in gaps:
        assert gap.log_prob_difference > 0 and gap.ratio != 1
        assert abs(math.log(gap.ratio)) == pytest.approx(gap.log_prob_difference)


def test_it_probes_the_steps_whose_states_were_kept_and_the_modalities_that_have_a_log_prob(
    one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    audio_by_ode = {"video": {"kind": "sde"}, "audio": {"kind": "ode"}}
    view, conditioning = one_sample(transition=audio_by_ode, return_steps=[1, 2, 4])
    assert [(gap.step, gap.modality) for gap in parity(transformer, view, conditioning)] == [(1, "video")]


@pytest.mark.parametrize(
    "request_fields",
    [
        {"return_steps": [0]},
        {"stochastic_steps": []},
        {"mode": "generate", "num_inference_steps": 2},
    ],
)
def test_where_no_step_can_be_replayed_there_is_nothing_to_say(
    request_fields: dict[str, object], one_sample: OneSample, transformer: LTX2VideoTransformer3DModel
) -> None:
    with counted_passes(transformer) as passes:
        assert parity(transformer, *one_sample(**request_fields)) == []
        sampled = len(passes)
        assert parity(transformer, *one_sample(**request_fields)) == []
        assert len(passes) == 2 * sampled, "the samples' own passes, and no others"


def test_it_asks_for_no_gradients(one_sample: OneSample, trainable: LTX2VideoTransformer3DModel) -> None:
    view, conditioning = one_sample()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda packed: packed):
        assert {gap.ratio for gap in parity(trainable, view, conditioning)} == {1.0}
    assert saved == []


@pytest.mark.parametrize(
    ("recorded", "difference", "ratio"), [(-1e4, math.inf, math.inf), (math.nan, math.nan, math.nan)]
)
def test_a_ratio_too_large_is_infinite_and_one_of_nothing_is_not_a_number(
    recorded: float,
    difference: float,
    ratio: float,
    one_sample: OneSample,
    transformer: LTX2VideoTransformer3DModel,
) -> None:
    view, conditioning = one_sample(stochastic_steps=[0])
    other = replace(view, manifest=view.manifest | {"log_probs_video": [recorded, *[None] * 5]})
    video, audio = parity(transformer, other, conditioning)
    assert video.ratio == pytest.approx(ratio, nan_ok=True)
    assert math.isnan(video.log_prob_difference) == math.isnan(difference)
    assert audio.ratio == 1


def test_what_replay_refuses_the_probe_refuses(one_sample: OneSample) -> None:
    view, conditioning = one_sample()
    with pytest.raises(ValueError, match="dtype: here 'bfloat16'"):
        parity(load("tiny", "transformer", dtype="bfloat16"), view, conditioning)
