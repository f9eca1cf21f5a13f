"""What a publication must agree with: names both ways, shapes, dtypes, an adapter's configuration."""

from typing import Any

import pytest
from diffusers import LTX2VideoTransformer3DModel
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from pydantic import ValidationError

from pipeline.weights import spec_of
from schemas.errors import Problem
from schemas.lora import LoraSpec, adapter_name
from schemas.validation import problem_of_validation_error
from schemas.weights import Publication, TensorSpec, weights_digest
from schemas.weights_check import check_names

Specs = dict[str, TensorSpec]

TARGET: Specs = {
    "proj_in.weight": TensorSpec(dtype="bfloat16", shape=(8, 4)),
    "proj_in.bias": TensorSpec(dtype="bfloat16", shape=(8,)),
    "norm.weight": TensorSpec(dtype="bfloat16", shape=(8,)),
    **{
        f"blocks.{block}.{layer}.weight": TensorSpec(dtype="bfloat16", shape=(6, 8))
        for block in range(3)
        for layer in ("to_q", "to_k", "to_out.0")
    },
}
CONFIG: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["to_q", "to_out.0"]}
HEX = "0" * 32


def pair(layer: str, rank: int = 2, dtype: str = "float32", form: str = "{}") -> Specs:
    rows, columns = TARGET[f"{layer}.weight"].shape
    return {
        form.format(f"{layer}.lora_A.weight"): TensorSpec(dtype=dtype, shape=(rank, columns)),
        form.format(f"{layer}.lora_B.weight"): TensorSpec(dtype=dtype, shape=(rows, rank)),
    }


def adapter(**kinds: Any) -> Specs:
    """The pairs that CONFIG names."""
    layers = [f"blocks.{block}.{layer}" for block in range(3) for layer in CONFIG["target_modules"]]
    return {name: spec for layer in layers for name, spec in pair(layer, **kinds).items()}


def refusal(update: Any, tensors: Specs, config: dict[str, Any] | None = None, **complete: bool) -> str:
    spec = None if config is None else LoraSpec.model_validate(config)
    with pytest.raises(ValueError) as caught:
        check_names(update, tensors, TARGET, spec, **complete)
    problem = Problem.of(caught.value)
    assert problem is not None and problem.code == "weights_refused"
    assert problem.field == "tensors" and problem.remedy.endswith("the policy before it is still served")
    return str(problem)


def without(specs: Specs, *names: str) -> Specs:
    return {name: spec for name, spec in specs.items() if name not in names}


# Full and partial


def test_the_transformers_own_names_are_taken_and_parts_of_them_where_that_is_asked() -> None:
    check_names("full", TARGET, TARGET)
    check_names("full", dict(reversed(TARGET.items())), TARGET)
    check_names("partial", without(TARGET, "norm.weight"), TARGET)
    check_names("full", without(TARGET, "norm.weight"), TARGET, complete=False)
    check_names("partial", {}, TARGET, complete=False)


def test_what_is_missing_unexpected_or_differs_is_counted_and_named() -> None:
    tensors = without(TARGET, "norm.weight") | {
        "extra.weight": TensorSpec(dtype="bfloat16", shape=(1,)),
        "proj_in.bias": TensorSpec(dtype="bfloat16", shape=(8, 1)),
        "proj_in.weight": TensorSpec(dtype="float32", shape=(8, 4)),
    }
    said = refusal("full", tensors)
    assert (
        "tensors must be the transformer's: 1 missing (norm.weight), 1 unexpected (extra.weight),"
        " 1 of another shape (proj_in.bias [8, 1] instead of [8]),"
        " 1 of another dtype (proj_in.weight float32 instead of bfloat16)"
    ) in said
    assert "missing" not in refusal("partial", tensors)
    assert "missing" not in refusal("full", tensors, complete=False)


def test_only_the_first_names_are_listed_of_many() -> None:
    said = refusal("full", {"proj_in.bias": TARGET["proj_in.bias"]})
    assert f"{len(TARGET) - 1} missing (blocks.0.to_k.weight, " in said
    assert f" and {len(TARGET) - 6} more)" in said


def test_a_partial_update_of_nothing_is_refused() -> None:
    assert "at least one" in refusal("partial", {})


@pytest.mark.parametrize("wrapper", ["transformer.", "_orig_mod.", "module."])
def test_a_wrappers_prefix_is_recognised(wrapper: str) -> None:
    said = refusal("full", {f"{wrapper}{name}": spec for name, spec in TARGET.items()})
    assert f'leave out "{wrapper}" before the names' in said


def test_the_state_dict_of_a_wrapped_model_is_recognised() -> None:
    wrapped = without(TARGET, "proj_in.weight") | {"proj_in.base_layer.weight": TARGET["proj_in.weight"]}
    assert "update lora" in refusal("full", wrapped)


@pytest.mark.parametrize("update", ["full", "partial", "lora"])
@pytest.mark.parametrize("name", ["connectors.video.weight", "text_encoder.x.lora_A.weight", "vae.x"])
def test_other_components_are_refused_by_name(update: str, name: str) -> None:
    foreign = {name: TensorSpec(dtype="bfloat16", shape=(1,))}
    for complete in (True, False):
        said = refusal(update, TARGET | foreign, CONFIG, complete=complete)
        assert f"do not follow policy versions: {name}" in said
        assert "publish the transformer's alone" in said


# LoRA


@pytest.mark.parametrize("form", ["{}", "base_model.model.{}", "transformer.{}"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_adapter_is_taken_in_every_form_and_dtype(form: str, dtype: str) -> None:
    check_names("lora", adapter(form=form, dtype=dtype), TARGET, LoraSpec.model_validate(CONFIG))


def test_an_adapters_own_name_is_found_in_every_form() -> None:
    for form in (
        "{}.lora_A.weight",
        "base_model.model.{}.lora_A.weight",
        "transformer.{}.lora_A.default.weight",
    ):
        assert adapter_name(form.format("transformer_blocks.0.to_q")) == (
            "transformer_blocks.0.to_q.lora_A.weight"
        )
    for other in ("to_q.weight", "to_q.lora_A.bias", "to_q.lora_down.weight", "to_q.alpha", "lora_A.weight"):
        assert adapter_name(other) is None


def test_one_layer_of_many_without_its_pair_is_missing() -> None:
    tensors = without(adapter(), *pair("blocks.1.to_q"))
    said = refusal("lora", tensors, CONFIG)
    assert "2 missing (blocks.1.to_q.lora_A.weight, blocks.1.to_q.lora_B.weight)" in said
    check_names("lora", tensors, TARGET, LoraSpec.model_validate(CONFIG), complete=False)


def test_a_b_without_its_a_and_an_a_without_its_b_are_found() -> None:
    assert "1 missing (blocks.0.to_q.lora_A.weight)" in refusal(
        "lora", without(adapter(), "blocks.0.to_q.lora_A.weight"), CONFIG
    )
    assert "1 missing (blocks.2.to_out.0.lora_B.weight)" in refusal(
        "lora", without(adapter(), "blocks.2.to_out.0.lora_B.weight"), CONFIG
    )


def test_a_layer_that_the_configuration_does_not_name_is_unexpected() -> None:
    said = refusal("lora", adapter() | pair("blocks.0.to_k"), CONFIG)
    assert "2 unexpected (blocks.0.to_k.lora_A.weight, blocks.0.to_k.lora_B.weight)" in said
    assert "unexpected" in refusal("lora", adapter() | pair("blocks.0.to_k"), CONFIG, complete=False)


def test_an_adapter_of_which_nothing_matches_says_so() -> None:
    renamed = {name.replace("blocks", "layers"): spec for name, spec in adapter().items()}
    said = refusal("lora", renamed, CONFIG)
    assert "got not one that does: layers.0.to_q.lora_A.weight" in said
    assert "wanted are blocks.0.to_out.0.lora_A.weight" in said
    assert "not one that does" in refusal("lora", {}, CONFIG)
    assert "no layer of the transformer fits" in refusal(
        "lora", adapter(), CONFIG | {"target_modules": ["query"]}
    )


def test_a_target_that_is_no_linear_layer_is_refused() -> None:
    for target in ("norm", "blocks.0"):
        said = refusal("lora", adapter(), CONFIG | {"target_modules": ["to_q", target]})
        assert f"names {target}, which is no linear layer" in said


def test_ranks_are_those_of_the_configuration() -> None:
    assert "6 of another shape" not in refusal("lora", adapter(rank=3), CONFIG)
    assert "12 of another shape (blocks.0.to_q.lora_A.weight [3, 8] instead of [2, 8]" in refusal(
        "lora", adapter(rank=3), CONFIG
    )
    patterned = CONFIG | {"r": 3, "rank_pattern": {"to_out.0": 2}}
    mixed = adapter(rank=3) | {
        name: spec for block in range(3) for name, spec in pair(f"blocks.{block}.to_out.0").items()
    }
    check_names("lora", mixed, TARGET, LoraSpec.model_validate(patterned))


def test_an_adapter_has_one_dtype() -> None:
    assert "one dtype" in refusal("lora", adapter() | pair("blocks.0.to_q", dtype="bfloat16"), CONFIG)
    assert "one dtype" in refusal("lora", adapter(dtype="float64"), CONFIG)


def test_one_weight_in_two_forms_is_refused() -> None:
    said = refusal("lora", adapter() | pair("blocks.0.to_q", form="transformer.{}"), CONFIG)
    assert "name each weight once" in said


# The configuration


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["to_q", "to_out.0"]},
        {"target_modules": {"attn1.to_k", "proj_in", "0.attn2.to_q"}},
        {"target_modules": r"transformer_blocks\.\d+\.(audio_)?attn1\.to_(q|k|v)"},
        {"target_modules": ["to_q", "ff.net.2"], "exclude_modules": ["attn2.to_q"]},
        {"target_modules": ["to_q"], "exclude_modules": r".*audio.*"},
    ],
    ids=["endings", "whole names", "expression", "excluded", "excluded by expression"],
)
def test_layers_are_matched_as_peft_matches_them(
    changes: dict[str, Any], transformer: LTX2VideoTransformer3DModel
) -> None:
    config = LoraConfig(**changes)
    spec = LoraSpec.model_validate(config)
    names = [name for name, _ in transformer.named_modules()]
    wanted = [name for name in names if check_target_module_exists(config, name)]
    assert wanted and [name for name in names if spec.targets(name)] == wanted


def test_a_configuration_is_taken_from_an_object_its_dict_and_its_json() -> None:
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["to_v", "to_q"], lora_dropout=0.1)
    spec = LoraSpec.model_validate(config)
    assert (spec.r, spec.lora_alpha, spec.target_modules) == (3, 5.0, ("to_q", "to_v"))
    assert LoraSpec.model_validate(config.to_dict()) == spec
    assert LoraSpec.model_validate_json(spec.model_dump_json()) == spec
    assert (spec.rank("x.to_q"), spec.scaling("x.to_q")) == (3, 5 / 3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["proj_out"]}, "modules_to_save"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"something_new": 3}, "something_new"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"target_modules": "all-linear"}, "target_modules"),
        ({"target_modules": "to_(q"}, "target_modules"),
        ({"rank_pattern": {"to_[": 3}}, "rank_pattern"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_modules": None}, "target_modules"),
        ({"r": 0}, "r"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_what_is_not_plain_lora_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        LoraSpec.model_validate(CONFIG | changes)
    problem = problem_of_validation_error(caught.value, LoraSpec)
    assert problem.field == field or (problem.field or "").startswith(f"{field}.")


# The publication


def publication(**fields: Any) -> Publication:
    said = {"version": 1, "update": "full", "tensors": TARGET, "digests": dict.fromkeys(TARGET, HEX)}
    return Publication.model_validate(said | fields)


def test_a_publication_goes_through_json() -> None:
    for said in (publication(), publication(update="lora", merge=True, lora_config=LoraConfig(**CONFIG))):
        assert Publication.model_validate_json(said.model_dump_json()) == said


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"update": "lora"}, "lora_config"),
        ({"lora_config": CONFIG}, "lora_config"),
        ({"merge": True}, "merge"),
        ({"version": 0}, "version"),
        ({"digests": {}}, "digests"),
        ({"update": "lora", "lora_config": CONFIG | {"use_dora": True}}, "lora_config.use_dora"),
    ],
)
def test_a_publication_that_contradicts_itself_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        publication(**fields)
    assert problem_of_validation_error(caught.value, Publication).field == field


def test_the_digest_of_a_policy_depends_on_everything_but_the_order() -> None:
    tensors, pair_digests = {"a": HEX, "b": "1" * 32}, {"a.lora_A.weight": HEX}
    spec = LoraSpec.model_validate(CONFIG)
    digests = [
        weights_digest(tensors),
        weights_digest(tensors | {"b": HEX}),
        weights_digest({"a": HEX}),
        weights_digest(tensors, pair_digests, spec),
        weights_digest(tensors, pair_digests, spec, merged=True),
        weights_digest(tensors, {"a.lora_A.weight": "1" * 32}, spec),
        weights_digest(tensors, pair_digests, LoraSpec.model_validate(CONFIG | {"lora_alpha": 5})),
    ]
    assert len(set(digests)) == len(digests)
    assert weights_digest(dict(reversed(tensors.items()))) == digests[0]
    assert weights_digest(tensors, {}) == digests[0]


def test_the_tiny_transformer_fits_itself(transformer: LTX2VideoTransformer3DModel) -> None:
    check_names("full", spec_of(transformer), spec_of(transformer))
