"""The policy: what is applied is what was published, to the bit, or nothing is."""

import gc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from peft import LoraConfig, set_peft_model_state_dict
from torch import Tensor

from pipeline.policy import Policy
from pipeline.tensors import frozen
from pipeline.weights import StoredTensor, digests_of, named_tensors, spec_of, stored
from schemas.errors import Problem
from schemas.weights import Publication
from tests.weights import Published, forward, fresh, moved, published, trained_adapter

ATTENTION = ["to_q", "to_v", "to_out.0"]
NUM_LAYERS = 2 * 6 * 3
"""Layers that ATTENTION names in the tiny transformer."""


@pytest.fixture
def model() -> LTX2VideoTransformer3DModel:
    """A transformer of one's own."""
    return fresh()


@pytest.fixture
def policy(model: LTX2VideoTransformer3DModel) -> Policy:
    return Policy(model)


@pytest.fixture
def trainer() -> LTX2VideoTransformer3DModel:
    """The trainer's own copy of the checkpoint."""
    return fresh()


def plain_lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": ATTENTION, **changes})


def lora(trainer: LTX2VideoTransformer3DModel, seed: int = 3, **fields: Any) -> Published:
    """The trainer's adapter as a publication. config, dtype: of the adapter."""
    config, dtype = fields.pop("config", None) or plain_lora(), fields.pop("dtype", None)
    tensors = trained_adapter(trainer, config, seed, dtype)
    return published(tensors, update="lora", lora_config=config.to_dict(), **fields)


def refusal(policy: Policy, publication: Publication, tensors: Mapping[str, StoredTensor]) -> Problem:
    """What `check` says, after which everything is as it was."""
    before = bits(policy)
    with pytest.raises(ValueError) as caught:
        policy.check(publication, tensors)
    problem = Problem.of(caught.value)
    assert problem is not None and problem.code == "weights_refused"
    assert bits(policy) == before
    return problem


def bits(policy: Policy) -> dict[str, str]:
    """Digests of all that the model computes with."""
    model = policy._transformer
    return digests_of({name: stored(tensor) for name, tensor in model.state_dict().items()})


def assert_same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def num_tensors() -> int:
    """Tensors alive in this process."""
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def addresses(model: LTX2VideoTransformer3DModel) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


# Full and partial


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


# A LoRA beside the layers


@pytest.mark.parametrize(
    ("served", "computed"),
    [("float32", None), ("bfloat16", None), ("bfloat16", torch.float32)],
    ids=["float32", "bfloat16", "float32 beside bfloat16"],
)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"to_q": 2, "0.attn1.to_v": 3}, "alpha_pattern": {"to_v": 5}},
        {"target_modules": r".*\.(ff|audio_ff)\.net\.(0\.proj|2)"},
        {"target_modules": ["to_k", "proj_in", "ff.net.2"], "exclude_modules": ["attn2.to_k"]},
        {"lora_dropout": 0.5, "init_lora_weights": "gaussian"},
    ],
    ids=["plain", "rslora", "patterns", "expression", "excluded", "dropout"],
)
def test_a_live_adapter_computes_the_bits_of_a_trainers_own_model(
    served: str, computed: torch.dtype | None, config: dict[str, Any]
) -> None:
    model, source, trainer = (fresh(served) for _ in range(3))
    policy = Policy(model)
    publication, tensors = lora(source, config=plain_lora(**config), dtype=computed)
    policy.check(publication, tensors)
    policy.apply(publication, tensors)

    trainer.add_adapter(plain_lora(**config))
    if computed is not None:
        for name, parameter in trainer.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(computed)
    state = trained_adapter(source, plain_lora(**config), 3, computed)
    assert not set_peft_model_state_dict(trainer, state).unexpected_keys
    trainer.eval()
    assert policy.verify() == []
    assert_same(forward(model), forward(trainer))
    assert not torch.equal(forward(model)[0], forward(fresh(served))[0])


@pytest.mark.parametrize("form", ["base_model.model.{}", "transformer.{}", "named"])
def test_an_adapter_is_the_same_in_every_form_of_its_names(
    form: str, policy: Policy, trainer: LTX2VideoTransformer3DModel
) -> None:
    publication, tensors = lora(trainer)
    other = Policy(fresh())
    other.apply(publication, tensors)

    def renamed(name: str) -> str:
        return name.replace(".weight", ".default.weight") if form == "named" else form.format(name)

    said = publication.model_copy(
        update={
            "tensors": {renamed(name): spec for name, spec in publication.tensors.items()},
            "digests": {renamed(name): digest for name, digest in publication.digests.items()},
        }
    )
    policy.check(said, {renamed(name): tensor for name, tensor in tensors.items()})
    policy.apply(said, {renamed(name): tensor for name, tensor in tensors.items()})
    assert policy.digest == other.digest
    assert policy.verify() == []


def test_50_updates_of_one_adapter_grow_nothing_and_move_nothing(
    policy: Policy, model: LTX2VideoTransformer3DModel, trainer: LTX2VideoTransformer3DModel
) -> None:
    policy.apply(*lora(trainer, seed=0))
    forward(model)
    places, modules = addresses(model), [id(module) for module in model.modules()]
    before = num_tensors()
    digests = {policy.digest}
    for version in range(2, 52):
        policy.apply(*lora(trainer, seed=version, version=version))
        digests.add(policy.digest)
    assert len(digests) == 51
    assert addresses(model) == places
    assert [id(module) for module in model.modules()] == modules
    assert num_tensors() <= before
    assert_same(forward(model), forward(trainer))


def test_another_rank_takes_the_place_of_the_adapter_before(
    policy: Policy, model: LTX2VideoTransformer3DModel, trainer: LTX2VideoTransformer3DModel
) -> None:
    policy.apply(*lora(fresh()))
    config = plain_lora(r=3, target_modules=["to_k"])
    policy.apply(*lora(trainer, config=config, version=2))
    assert policy.verify() == []
    assert_same(forward(model), forward(trainer))
    assert sorted(name.rsplit(".", 2)[0] for name in addresses(model) if "lora_A" in name) == sorted(
        f"{name}.lora_A" for name in named_modules_ending(fresh(), "to_k")
    )


def named_modules_ending(model: LTX2VideoTransformer3DModel, ending: str) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith(f".{ending}")]


def test_the_same_layers_with_another_scaling_compute_otherwise(
    policy: Policy, model: LTX2VideoTransformer3DModel, trainer: LTX2VideoTransformer3DModel
) -> None:
    policy.apply(*lora(fresh()))
    before = policy.digest
    policy.apply(*lora(trainer, config=plain_lora(lora_alpha=8)))
    assert policy.digest != before
    assert_same(forward(model), forward(trainer))


@pytest.mark.parametrize("merge", [False, True], ids=["live", "merged"])
def test_a_full_update_drops_the_adapter_and_the_names_are_as_before(
    merge: bool, policy: Policy, model: LTX2VideoTransformer3DModel, trainer: LTX2VideoTransformer3DModel
) -> None:
    names, modules = list(model.state_dict()), [id(module) for module in model.modules()]
    policy.apply(*lora(fresh(), merge=merge))
    assert list(model.state_dict()) != names and spec_of(model) == policy.spec
    state = moved(trainer, seed=4)
    trainer.load_state_dict(state)
    policy.apply(*published(state, version=2))
    assert list(model.state_dict()) == names
    assert [id(module) for module in model.modules()] == modules
    assert not getattr(model, "peft_config", None)
    assert policy.digest == Policy(trainer).digest
    assert_same(forward(model), forward(trainer))


@pytest.mark.parametrize("merge", [False, True], ids=["live", "merged"])
def test_a_partial_update_reaches_the_weights_under_an_adapter(
    merge: bool, policy: Policy, model: LTX2VideoTransformer3DModel
) -> None:
    names = ["transformer_blocks.0.attn1.to_q.weight", "transformer_blocks.0.attn1.to_k.bias"]
    part = {name: tensor for name, tensor in moved(model, seed=5).items() if name in names}
    adapter = lora(fresh(), merge=merge)
    policy.apply(*adapter)
    before = policy.digest
    policy.apply(*published(part, version=2, update="partial"))
    assert policy.version == 2 and policy.digest != before and policy.verify() == []

    other = Policy(fresh())
    other.apply(*published(part, update="partial"))
    other.apply(*adapter)
    assert other.digest == policy.digest
    assert_same(forward(model), forward(other._transformer))


# A LoRA in the layers


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


# What is refused, and that nothing has happened then


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


# Reading it back


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


# Sleep and wake


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
