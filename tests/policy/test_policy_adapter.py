"""A LoRA beside the layers: its bits are those of the trainer's own model, and later updates replace it, reach under it, or drop it."""

from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from peft import set_peft_model_state_dict

from pipeline.policy import Policy
from pipeline.weights import spec_of
from tests.policy.comparing import addresses, assert_same, num_tensors
from tests.weights import forward, fresh, lora, moved, plain_lora, published, trained_adapter


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
    before = num_tensors(policy)
    digests = {policy.digest}
    for version in range(2, 52):
        policy.apply(*lora(trainer, seed=version, version=version))
        digests.add(policy.digest)
    assert len(digests) == 51
    assert addresses(model) == places
    assert [id(module) for module in model.modules()] == modules
    assert len(places) <= before, "its parameters are among them"
    assert num_tensors(policy) <= before
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
