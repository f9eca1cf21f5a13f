"""The execution profile: what a forward pass's bits depend on besides weights and inputs."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.configuration_utils import FrozenDict
from diffusers.models.attention_dispatch import attention_backend
from peft import LoraConfig

from pipeline.checkpoint import load
from pipeline.profile import ADOPTABLE, LIBRARIES, ExecutionProfile, adopt, library_versions, profile_of


@pytest.fixture
def restored() -> Iterator[None]:
    """The process's threads and attention backend are as they were when the test is over."""
    num_threads = torch.get_num_threads()
    with attention_backend("native"):
        yield
    torch.set_num_threads(num_threads)


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


@pytest.mark.usefixtures("restored")
def test_an_attention_backend_is_part_of_it_whether_set_on_the_model_or_for_the_process(
    transformer: LTX2VideoTransformer3DModel,
) -> None:
    with attention_backend("_native_math"):
        assert profile_of(transformer).attention_backend == "_native_math"
    assert profile_of(transformer).attention_backend == "native"
    other = load("tiny", "transformer")
    other.set_attention_backend("_native_math")
    assert profile_of(other).attention_backend == "_native_math"


def test_an_adapter_is_part_of_it_as_it_is_applied() -> None:
    transformer: Any = load("tiny", "transformer")
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    assert profile_of(transformer).lora == "live"
    transformer.disable_adapters()
    assert profile_of(transformer).lora == "live", "a reference policy is comparable"
    transformer.enable_adapters()
    transformer.fuse_lora()
    assert profile_of(transformer).lora == "merged"
    transformer.unfuse_lora()
    assert profile_of(transformer).lora == "live"
    transformer.delete_adapters("default")
    transformer.unload_lora()
    assert profile_of(transformer).lora == "none"


def other_architecture(**changes: Any) -> Any:
    """An untrained transformer whose config is the tiny one's, save for the changes."""
    return LTX2VideoTransformer3DModel.from_config({**load("tiny", "transformer").config, **changes})


def test_another_architecture_is_part_of_it(transformer: LTX2VideoTransformer3DModel) -> None:
    digest = profile_of(transformer).transformer
    assert len(digest) == 16 and digest == profile_of(load("tiny", "transformer")).transformer
    others = [
        profile_of(other_architecture(**changes)).transformer
        for changes in ({"num_layers": 1}, {"norm_eps": 1e-5}, {"rope_type": "interleaved"})
    ]
    assert len({digest, *others}) == 4


def test_where_the_checkpoint_came_from_and_who_saved_it_are_not(
    transformer: LTX2VideoTransformer3DModel,
) -> None:
    copied = other_architecture(_diffusers_version="9.9", _name_or_path="/elsewhere")
    assert profile_of(copied).transformer == profile_of(transformer).transformer


def test_an_entry_that_only_a_later_diffusers_writes_at_its_default_is_not(
    transformer: LTX2VideoTransformer3DModel,
) -> None:
    earlier = other_architecture()
    later = "use_keyframes_abs_pos_embedding"
    earlier._internal_dict = FrozenDict({k: v for k, v in earlier.config.items() if k != later})
    assert later in transformer.config and later not in earlier.config
    assert profile_of(earlier).transformer == profile_of(transformer).transformer


def test_the_versions_are_those_that_are_installed() -> None:
    assert library_versions() == {name: version(name) for name in LIBRARIES}


# Adopting one


@pytest.mark.usefixtures("restored")
def test_what_can_be_set_is_adopted_and_nothing_differs_then() -> None:
    transformer = load("tiny", "transformer")
    own = profile_of(transformer)
    recorded = own.as_dict() | {"num_threads": 2, "attention_backend": "_native_math"}
    assert adopt(recorded, transformer) == {}
    assert torch.get_num_threads() == 2
    assert profile_of(transformer).as_dict() == recorded
    assert adopt(own.as_dict(), transformer) == {}
    assert profile_of(transformer) == own


@pytest.mark.usefixtures("restored")
def test_what_cannot_be_set_is_returned_with_both_values() -> None:
    transformer = load("tiny", "transformer")
    own = profile_of(transformer)
    rest = {"dtype": "bfloat16", "lora": "live", "torch": "1.0", "tf32": True, "transformer": "another"}
    left = adopt(own.as_dict() | rest | {"num_threads": 2}, transformer)
    assert left == {key: (getattr(own, key), value) for key, value in rest.items()}
    assert torch.get_num_threads() == 2, "the rest is adopted all the same"
    assert not torch.backends.cuda.matmul.allow_tf32, "a model on a CPU has no say in it"


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("backend", ["flash_of_genius", "flash", 7])
def test_a_backend_that_is_not_there_is_returned_and_the_own_one_stays(
    backend: object, transformer: LTX2VideoTransformer3DModel
) -> None:
    left = adopt(profile_of(transformer).as_dict() | {"attention_backend": backend}, transformer)
    assert left == {"attention_backend": ("native", backend)}


@pytest.mark.usefixtures("restored")
def test_a_gpus_profile_leaves_the_threads_of_a_cpu_alone(transformer: LTX2VideoTransformer3DModel) -> None:
    num_threads = torch.get_num_threads()
    left = adopt(
        profile_of(transformer).as_dict() | {"num_threads": None, "device": "NVIDIA H200"}, transformer
    )
    assert set(left) == {"num_threads", "device"} and torch.get_num_threads() == num_threads


def test_what_is_adoptable_is_in_the_profile() -> None:
    assert set(ADOPTABLE) < set(ExecutionProfile.__dataclass_fields__)
