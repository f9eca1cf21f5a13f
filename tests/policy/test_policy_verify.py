"""Reading the weights back finds a single flipped bit."""

import numpy as np
import pytest
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from pipeline.policy import Policy
from pipeline.weights import stored
from tests.weights import lora, moved, published


def flip(tensor: Tensor) -> None:
    stored(tensor).array.reshape(-1).view(np.uint8)[0] ^= 1


def test_verify_finds_a_flipped_bit_in_what_was_written(
    policy: Policy, model: LTX2VideoTransformer3DModel
) -> None:
    policy.apply(*published(moved(model, seed=1)))
    flip(model.audio_proj_in.weight)
    flip(model.transformer_blocks[0].scale_shift_table)
    assert sorted(policy.verify()) == ["audio_proj_in.weight", "transformer_blocks.0.scale_shift_table"]


@pytest.mark.parametrize("merge", [False, True], ids=["live", "merged"])
def test_verify_finds_a_flipped_bit_in_an_adapter(
    merge: bool, policy: Policy, model: LTX2VideoTransformer3DModel, trainer: LTX2VideoTransformer3DModel
) -> None:
    policy.apply(*lora(trainer, merge=merge))
    layer = model.transformer_blocks[1].attn2.to_v
    flip(layer.lora_B["policy"].weight)
    assert "transformer_blocks.1.attn2.to_v.lora_B.weight" in policy.verify()
    flip(layer.lora_B["policy"].weight)
    assert policy.verify() == []
    if merge:
        flip(layer.base_layer.weight)
        assert policy.verify() == ["transformer_blocks.1.attn2.to_v.weight"]
