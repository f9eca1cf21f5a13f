"""Full and partial updates: what is computed with is what the trainer has, to the bit and in place."""

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel

from pipeline.policy import Policy
from tests.policy.comparing import addresses, assert_same
from tests.weights import forward, fresh, moved, published


def test_a_fresh_policy_has_the_checkpoints_digest_and_version_0(policy: Policy) -> None:
    assert (policy.version, policy.is_intact, policy.verify()) == (0, True, [])
    assert policy.digest == Policy(fresh()).digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_full_update_gives_the_trainers_bits_in_place(dtype: str) -> None:
    model, trainer = (fresh(dtype) for _ in range(2))
    policy, before = Policy(model), addresses(model)
    state = moved(trainer, seed=1)
    trainer.load_state_dict(state)
    publication, tensors = published(state, version=7)
    policy.check(publication, tensors)
    policy.apply(publication, tensors)
    assert (policy.version, policy.is_intact, policy.verify()) == (7, True, [])
    assert policy.digest == Policy(trainer).digest
    assert addresses(model) == before
    assert {tensor.dtype for tensor in model.state_dict().values()} == {getattr(torch, dtype)}
    assert_same(forward(model), forward(trainer))


def test_a_partial_update_changes_the_tensors_it_names_and_the_digest(
    policy: Policy, model: LTX2VideoTransformer3DModel, trainer: LTX2VideoTransformer3DModel
) -> None:
    name = "transformer_blocks.1.attn1.to_out.0.weight"
    part = {name: moved(trainer, seed=2)[name]}
    trainer.load_state_dict(part, strict=False)
    policy.apply(*published(part, update="partial"))
    assert policy.digest == Policy(trainer).digest
    assert policy.verify() == []
    assert_same(forward(model), forward(trainer))


def test_an_update_comes_from_read_only_memory_without_a_copy_of_its_own(policy: Policy) -> None:
    publication, tensors = published(moved(policy._transformer, seed=1))
    for tensor in tensors.values():
        tensor.array.flags.writeable = False
    policy.apply(publication, tensors)
    assert policy.verify() == []
