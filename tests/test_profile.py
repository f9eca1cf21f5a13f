"""The execution profile: what a forward pass's bits depend on besides weights and inputs."""

from importlib.metadata import version
from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.attention_dispatch import attention_backend
from peft import LoraConfig

from pipeline.checkpoint import load
from pipeline.profile import LIBRARIES, library_versions, profile_of


def test_the_profile_says_what_the_transformer_runs_with(transformer: LTX2VideoTransformer3DModel) -> None:
    profile = profile_of(transformer)
    assert profile.dtype == "float32"
    assert profile.num_threads == torch.get_num_threads()
    assert profile.attention_backend == "native"
    assert profile.lora == "none" and not profile.compiled and not profile.tf32
    assert profile.torch == torch.__version__
    assert profile.as_dict() == profile_of(transformer).as_dict()


def test_a_profile_does_not_differ_from_its_own_dict(transformer: LTX2VideoTransformer3DModel) -> None:
    profile = profile_of(transformer)
    assert profile.differences(profile.as_dict()) == {}


def test_differences_name_the_field_and_both_values(transformer: LTX2VideoTransformer3DModel) -> None:
    profile = profile_of(transformer)
    other = profile.as_dict() | {"dtype": "bfloat16", "device": "NVIDIA H200"}
    assert profile.differences(other) == {
        "dtype": ("float32", "bfloat16"),
        "device": (profile.device, "NVIDIA H200"),
    }


def test_a_field_that_the_other_lacks_is_a_difference(transformer: LTX2VideoTransformer3DModel) -> None:
    profile = profile_of(transformer)
    other = {key: value for key, value in profile.as_dict().items() if key != "torch"}
    assert profile.differences(other) == {"torch": (torch.__version__, None)}


def test_the_number_of_threads_is_part_of_it(transformer: LTX2VideoTransformer3DModel) -> None:
    before = profile_of(transformer)
    torch.set_num_threads(before.num_threads + 1)
    try:
        assert set(profile_of(transformer).differences(before.as_dict())) == {"num_threads"}
    finally:
        torch.set_num_threads(before.num_threads)


def test_the_models_dtype_is_part_of_it() -> None:
    assert profile_of(load("tiny", "transformer", dtype="bfloat16")).dtype == "bfloat16"


def test_an_attention_backend_is_part_of_it_whether_set_on_the_model_or_for_the_process(
    transformer: LTX2VideoTransformer3DModel,
) -> None:
    with attention_backend("_native_math"):
        assert profile_of(transformer).attention_backend == "_native_math"
    assert profile_of(transformer).attention_backend == "native"
    other = load("tiny", "transformer")
    other.set_attention_backend("_native_math")
    assert profile_of(other).attention_backend == "_native_math"


def test_a_live_adapter_is_part_of_it() -> None:
    transformer: Any = load("tiny", "transformer")
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    assert profile_of(transformer).lora == "live"


def test_the_versions_are_those_that_are_installed() -> None:
    assert library_versions() == {name: version(name) for name in LIBRARIES}
