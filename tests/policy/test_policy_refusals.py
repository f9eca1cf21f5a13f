"""What is refused is found before anything has happened, and what fails midway is told until it is mended."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from pipeline.policy import Policy
from pipeline.tensors import frozen
from pipeline.weights import StoredTensor
from schemas.errors import Problem
from schemas.weights import Publication
from tests.policy.comparing import bits
from tests.weights import ATTENTION, fresh, lora, moved, plain_lora, published, trained_adapter

NUM_LAYERS = 2 * 6 * 3
"""Layers that ATTENTION names in the tiny transformer."""


def refusal(policy: Policy, publication: Publication, tensors: Mapping[str, StoredTensor]) -> Problem:
    """What `check` says, after which everything is as it was."""
    before = bits(policy)
    with pytest.raises(ValueError) as caught:
        policy.check(publication, tensors)
    problem = Problem.of(caught.value)
    assert problem is not None and problem.code == "weights_refused"
    assert bits(policy) == before
    return problem


def test_every_fault_of_names_is_found_against_the_model(
    policy: Policy, trainer: LTX2VideoTransformer3DModel
) -> None:
    state = dict(trainer.state_dict())
    name = "transformer_blocks.0.attn1.to_out.0.weight"
    without = {key: tensor for key, tensor in state.items() if key != name}
    assert f"1 missing ({name})" in str(refusal(policy, *published(without)))
    assert "1 unexpected (extra)" in str(refusal(policy, *published({**state, "extra": torch.zeros(1)})))
    assert "[3] instead of [32, 32]" in str(refusal(policy, *published({**state, name: torch.zeros(3)})))
    narrow = {**state, name: state[name].bfloat16()}
    assert "bfloat16 instead of float32" in str(refusal(policy, *published(narrow)))


def test_one_layer_of_many_that_does_not_match_is_found(
    policy: Policy, trainer: LTX2VideoTransformer3DModel
) -> None:
    config = plain_lora()
    state = trained_adapter(trainer, config, seed=1)
    assert len(state) == 2 * NUM_LAYERS
    wrong = {name.replace("blocks.1.attn1.to_out.0", "blocks.1.attn1.to_out"): t for name, t in state.items()}
    problem = refusal(policy, *published(wrong, update="lora", lora_config=config.to_dict()))
    assert "2 missing (transformer_blocks.1.attn1.to_out.0.lora_A.weight" in problem.rule
    assert "2 unexpected (transformer_blocks.1.attn1.to_out.lora_A.weight" in problem.rule


def test_layers_that_peft_cannot_wrap_are_found_before_it_tries(
    policy: Policy, trainer: LTX2VideoTransformer3DModel
) -> None:
    state = trained_adapter(trainer, plain_lora(), seed=1)
    config = plain_lora(target_modules=[*ATTENTION, "rope"]).to_dict()
    problem = refusal(policy, *published(state, update="lora", lora_config=config))
    assert "target_modules names rope, no linear layers" in problem.rule


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_found(
    value: float, policy: Policy, trainer: LTX2VideoTransformer3DModel
) -> None:
    state = dict(trainer.state_dict())
    state["proj_out.bias"] = state["proj_out.bias"].clone()
    state["proj_out.bias"][-1] = value
    assert "NaN or infinity in 1 (proj_out.bias)" in str(refusal(policy, *published(state)))


def test_a_byte_that_changed_on_the_way_is_found(
    policy: Policy, trainer: LTX2VideoTransformer3DModel
) -> None:
    publication, tensors = published(trainer.state_dict())
    tensors["proj_in.bias"].array.view(np.uint8)[1] ^= 1
    assert "1 have not (proj_in.bias)" in str(refusal(policy, publication, tensors))


def test_tensors_that_the_publication_does_not_speak_of_are_found(
    policy: Policy, trainer: LTX2VideoTransformer3DModel
) -> None:
    publication, tensors = published(trainer.state_dict())
    del tensors["proj_in.bias"]
    assert "1 are not (proj_in.bias)" in str(refusal(policy, publication, tensors))


def test_a_refused_apply_leaves_everything_as_it_was(
    policy: Policy, model: LTX2VideoTransformer3DModel, trainer: LTX2VideoTransformer3DModel
) -> None:
    policy.apply(*lora(trainer, merge=True))
    before, digest = bits(policy), policy.digest
    state = moved(fresh(), seed=3)
    del state["audio_proj_out.bias"]
    with pytest.raises(ValueError, match="1 missing"):
        policy.apply(*published(state, version=2))
    assert (bits(policy), policy.digest, policy.version, policy.is_intact) == (before, digest, 1, True)
    assert policy.verify() == []


def test_an_apply_that_fails_midway_says_so_until_a_full_one_mends_it(
    policy: Policy, model: LTX2VideoTransformer3DModel
) -> None:
    publication, tensors = published(moved(model, seed=1))
    first, *_ = publication.tensors
    whole, before = policy._tensors["proj_out.weight"], policy._tensors[first].clone()
    assert first != "proj_out.weight"
    policy._tensors["proj_out.weight"] = frozen(
        np.zeros_like(whole.detach().numpy())
    )  # refuses to be written
    with pytest.raises(RuntimeError, match="data pointer"):
        policy.apply(publication, tensors)
    assert not policy.is_intact and policy.version == 0
    assert not torch.equal(policy._tensors[first], before), "some of it was written"
    policy._tensors["proj_out.weight"] = whole
    policy.apply(*published({"proj_out.weight": tensors_of(tensors)["proj_out.weight"]}, update="partial"))
    assert not policy.is_intact
    policy.apply(publication, tensors)
    assert policy.is_intact and policy.verify() == []


def tensors_of(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(tensor.array) for name, tensor in tensors.items()}


def test_a_transformer_that_has_an_adapter_already_is_refused(trainer: LTX2VideoTransformer3DModel) -> None:
    trainer.add_adapter(plain_lora())
    with pytest.raises(ValueError, match="must have no adapter, got default"):
        Policy(trainer)
