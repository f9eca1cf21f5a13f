"""Sleep and wake keep every bit, and may come twice."""

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel

from pipeline.policy import Policy
from tests.policy.comparing import assert_same, bits
from tests.weights import forward, fresh, lora

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("merge", [False, True], ids=["live", "merged"])
def test_sleep_and_wake_are_idempotent_and_keep_every_bit(
    merge: bool, device: str, trainer: LTX2VideoTransformer3DModel
) -> None:
    model = fresh(device=device)
    policy = Policy(model)
    policy.apply(*lora(trainer, merge=merge))
    before, outputs = bits(policy), forward(model)
    policy.to_device()
    for _ in range(2):
        policy.to_host()
        tensors = model.state_dict().values()
        assert all(tensor.is_cpu and (device == "cpu" or tensor.is_pinned()) for tensor in tensors)
        assert bits(policy) == before and policy.verify() == []
    with pytest.raises(AssertionError, match="to_device first"):
        policy.apply(*lora(trainer, seed=9, version=2, merge=merge))
    policy.to_device()
    policy.to_device()
    assert bits(policy) == before
    assert {tensor.device.type for tensor in model.state_dict().values()} == {device}
    assert_same(forward(model), outputs)
    policy.apply(*lora(trainer, seed=9, version=2, merge=merge))
    assert policy.version == 2 and policy.verify() == []
