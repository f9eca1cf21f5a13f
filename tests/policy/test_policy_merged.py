"""A LoRA merged into the layers computes nearly the same, and is undone to the bit."""

import torch
from diffusers import LTX2VideoTransformer3DModel

from pipeline.policy import Policy
from pipeline.weights import digests_of, named_tensors, stored
from tests.policy.comparing import assert_same
from tests.weights import forward, fresh, lora


def test_a_merged_adapter_computes_nearly_the_same_with_another_digest(
    policy: Policy, model: LTX2VideoTransformer3DModel, trainer: LTX2VideoTransformer3DModel
) -> None:
    live = Policy(fresh())
    live.apply(*lora(trainer))
    policy.apply(*lora(trainer, merge=True))
    assert policy.verify() == [] and policy.digest != live.digest
    for merged, own in zip(forward(model), forward(trainer), strict=True):
        torch.testing.assert_close(merged, own, rtol=1e-5, atol=1e-5)


def test_a_merge_is_undone_to_the_bit_by_whatever_comes_next(
    policy: Policy, model: LTX2VideoTransformer3DModel, trainer: LTX2VideoTransformer3DModel
) -> None:
    own = digests_of({name: stored(tensor.clone()) for name, tensor in named_tensors(model).items()})
    places = {name: tensor.data_ptr() for name, tensor in named_tensors(model).items()}
    for version in range(1, 6):
        policy.apply(*lora(trainer, seed=version, version=version, merge=True))
        assert policy.verify() == []
    again = Policy(fresh())
    again.apply(*lora(trainer, seed=5, merge=True))
    assert policy.digest == again.digest
    assert_same(forward(model), forward(again._transformer))
    policy.apply(*lora(trainer, seed=6, version=6))
    assert_same(forward(model), forward(trainer))
    assert digests_of({name: stored(tensor) for name, tensor in named_tensors(model).items()}) == own
    assert {name: tensor.data_ptr() for name, tensor in named_tensors(model).items()} == places
