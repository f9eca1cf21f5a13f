"""Tensors on their way: bits as they were, in chunks, hashed, looked through, and read from files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from diffusers import LTX2Pipeline, LTX2VideoTransformer3DModel
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeline.checkpoint import load
from pipeline.weight_files import lora_config_of, read_file, specs_of_file
from pipeline.weights import (
    check_finite,
    chunks_of,
    digests_of,
    named_tensors,
    non_finite,
    spec_of,
    specs_of,
    stored,
    tensor_of,
)
from schemas.errors import Problem
from schemas.lora import LoraSpec
from schemas.weights import TensorSpec
from schemas.weights_check import check_names

DTYPES = ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def refusal(function: Any, *arguments: Any) -> Problem:
    with pytest.raises(ValueError) as caught:
        result = function(*arguments)
        if isinstance(result, Iterable):
            list(result)
    problem = Problem.of(caught.value)
    assert problem is not None and problem.code == "weights_refused"
    return problem


# Bits


@pytest.mark.parametrize("dtype", [*DTYPES, "int64", "uint8", "bool"])
def test_a_tensors_bits_and_dtype_survive(dtype: str) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    there = stored(tensor)
    assert there.spec == TensorSpec(dtype=dtype, shape=(3, 4))
    back = tensor_of(there)
    assert back.dtype == tensor.dtype and torch.equal(
        back.clone().view(torch.uint8), tensor.view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_contiguous_and_on_the_host_is_not_copied(dtype: str) -> None:
    parameter = nn.Parameter(torch.zeros(4, 4, dtype=getattr(torch, dtype)))
    there = stored(parameter)
    with torch.no_grad():
        parameter[0, 0] = 1
    assert there.array[0, 0] != 0
    assert tensor_of(there)[0, 0] == 1
    turned = stored(torch.arange(6).reshape(2, 3).T)
    assert turned.array.flags.c_contiguous and turned.array.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_is_read_back_cannot_be_written() -> None:
    with pytest.raises(RuntimeError):
        tensor_of(stored(torch.zeros(3))).mul_(2)


def test_an_adapter_changes_neither_names_nor_specs() -> None:
    model = load("tiny", "transformer")
    names, specs = list(named_tensors(model)), spec_of(model)
    assert names == list(model.state_dict())
    model.add_adapter(LoraConfig(target_modules=["to_q", "proj_in"]))
    assert list(named_tensors(model)) == names and spec_of(model) == specs


# Digests and infinities


@pytest.mark.parametrize("num_threads", [1, 3])
def test_digests_are_of_the_bytes_in_their_order(num_threads: int) -> None:
    tensors = {str(n): torch.randn(n, 3).bfloat16() for n in range(20)} | {"scalar": torch.tensor(2.0)}
    digests = digests_of({name: stored(tensor) for name, tensor in tensors.items()}, num_threads)
    assert list(digests) == list(tensors)
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert digests[name] == xxhash.xxh3_128_hexdigest(raw)


def test_one_bit_changes_a_digest() -> None:
    tensor = torch.zeros(1000)
    before = digests_of({"a": stored(tensor)})
    stored(tensor).array.view(np.uint8)[1234] ^= 4
    assert digests_of({"a": stored(tensor)}) != before


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float8_e4m3fn"])
@pytest.mark.parametrize("place", [0, 600_000, -1])
def test_a_value_that_is_not_finite_is_found(value: float, dtype: str, place: int) -> None:
    tensor = torch.full((700_001,), 1.0).to(getattr(torch, dtype))
    sound = stored(tensor.clone())
    tensor[place] = value
    found = non_finite({"sound": sound, "broken": stored(tensor), "n": stored(torch.arange(3))}, 2)
    assert found == ["broken"]


def test_a_nan_is_found_where_there_is_no_infinity() -> None:
    assert non_finite({"a": stored(torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn))}) == ["a"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_smallest_values_are_finite(dtype: str) -> None:
    kind = torch.finfo(getattr(torch, dtype))
    values = torch.tensor([0.0, -0.0, kind.max, kind.min, kind.tiny, kind.eps], dtype=torch.float64)
    assert non_finite({"a": stored(values.to(getattr(torch, dtype)))}) == []


def test_names_that_are_not_finite_are_listed() -> None:
    check_finite({"a": stored(torch.zeros(2))})
    bad = {f"w{k}": stored(torch.tensor([float("nan")])) for k in range(7)}
    assert "7 (w0, w1, w2, w3, w4 and 2 more)" in refusal(check_finite, bad).rule


# Chunks


def test_a_dict_is_cut_into_chunks_of_at_most_so_many_bytes() -> None:
    tensors = {str(k): torch.full((10,), float(k)) for k in range(7)} | {"large": torch.zeros(100)}
    chunks = list(chunks_of(tensors, max_bytes=120))
    assert [list(chunk) for chunk in chunks] == [["0", "1", "2"], ["3", "4", "5"], ["6"], ["large"]]
    assert {name: tensor for chunk in chunks for name, tensor in specs_of(chunk).items()} == {
        name: stored(tensor).spec for name, tensor in tensors.items()
    }


def test_an_iterators_parts_are_asked_for_one_by_one_and_kept_apart() -> None:
    asked: list[int] = []

    def parts() -> Iterable[dict[str, Tensor]]:
        for k in range(3):
            asked.append(k)
            yield {f"{k}.{i}": torch.zeros(10) for i in range(2)}

    chunks = chunks_of(parts(), max_bytes=1000)
    assert list(next(chunks)) == ["0.0", "0.1"] and asked == [0]
    assert [list(chunk) for chunk in chunks] == [["1.0", "1.1"], ["2.0", "2.1"]]


def test_a_name_that_comes_twice_is_refused() -> None:
    parts = [{"a": torch.zeros(1)}, {"b": torch.zeros(1)}, {"a": torch.zeros(1)}]
    assert "got a twice" in refusal(chunks_of, parts).rule


@pytest.mark.parametrize(
    "value",
    [np.zeros(3), torch.empty(3, device="meta"), torch.eye(3).to_sparse()],
    ids=["numpy", "meta", "sparse"],
)
def test_what_has_no_bits_to_send_is_refused_by_name(value: Any) -> None:
    assert refusal(chunks_of, {"a": torch.zeros(1), "b": value}).field == "tensors.b"


@pytest.mark.parametrize("given", [5, ["a"], [torch.zeros(1)]], ids=["number", "names", "tensors"])
def test_what_is_no_state_dict_is_refused(given: Any) -> None:
    assert "must be a state dict" in refusal(chunks_of, given).rule


# Files


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, transformer: LTX2VideoTransformer3DModel) -> Path:
    """One folder per way to save the tiny transformer."""
    root = tmp_path_factory.mktemp("saved")
    transformer.save_pretrained(root / "one")
    transformer.save_pretrained(root / "sharded", max_shard_size="150KB")
    without_index = root / "shards"
    without_index.mkdir()
    for shard in (root / "sharded").glob("*.safetensors"):
        (without_index / shard.name).symlink_to(shard)
    return root


def test_a_file_with_a_dtype_that_no_transformer_has_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "odd.safetensors"
    save_file({"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.uint16)}, file)
    for read in (specs_of_file, read_file):
        problem = refusal(read, file)
        assert (problem.field, problem.value) == ("path", str(file)) and "(b U16)" in problem.rule


@pytest.mark.parametrize("where", ["one", "sharded", "shards", "one/diffusion_pytorch_model.safetensors"])
def test_a_saved_transformer_is_read_as_it_was(
    where: str, saved: Path, transformer: LTX2VideoTransformer3DModel
) -> None:
    path = saved / where
    assert specs_of_file(path) == spec_of(transformer)
    parts = list(read_file(path))
    assert (len(parts) > 2) == ("shard" in where)
    digests = {name: d for chunk in chunks_of(read_file(path)) for name, d in digests_of(chunk).items()}
    state = transformer.state_dict()
    assert digests == digests_of({name: stored(tensor) for name, tensor in state.items()})
    assert lora_config_of(path) is None


def test_bfloat16_is_read_as_bfloat16(tmp_path: Path) -> None:
    tensor = torch.randn(5, 7).bfloat16()
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    (part,) = read_file(tmp_path)
    assert part["a"].dtype == torch.bfloat16 and torch.equal(part["a"], tensor)
    assert specs_of_file(tmp_path) == {"a": TensorSpec(dtype="bfloat16", shape=(5, 7))}


@pytest.mark.parametrize("num_bytes", [0, 5, 100, -1])
def test_a_truncated_file_is_refused_by_name_before_anything_is_read(num_bytes: int, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(50)}, tmp_path / "1.safetensors")
    file = tmp_path / "2.safetensors"
    save_file({"b": torch.zeros(50)}, file)
    file.write_bytes(file.read_bytes()[:num_bytes])
    for function in (specs_of_file, lambda path: next(read_file(path))):
        problem = refusal(function, tmp_path)
        assert problem.value == str(file) and "whole .safetensors file" in problem.rule


def test_a_path_that_holds_no_weights_is_refused(tmp_path: Path, saved: Path) -> None:
    assert "exist" in refusal(specs_of_file, tmp_path / "nowhere").rule
    assert "hold a .safetensors file" in refusal(specs_of_file, tmp_path).rule
    pickled = tmp_path / "weights.bin"
    torch.save({"a": torch.zeros(1)}, pickled)
    assert "file or a folder" in refusal(specs_of_file, pickled).rule
    foreign = tmp_path / "text.safetensors"
    foreign.write_text("what a fine day it is today")
    assert refusal(specs_of_file, foreign).value == str(foreign)
    whole = tmp_path / "pipeline"
    (whole / "transformer").mkdir(parents=True)
    assert f"use {whole / 'transformer'}" in refusal(specs_of_file, whole).remedy


def test_a_name_in_two_files_is_refused_with_both(tmp_path: Path) -> None:
    for file in ("model.fp16.safetensors", "model.safetensors"):
        save_file({"a": torch.zeros(1)}, tmp_path / file)
    assert "is in model.fp16.safetensors and model.safetensors" in refusal(specs_of_file, tmp_path).rule


@pytest.mark.parametrize("fault", ["no shard", "name elsewhere", "name besides", "no map", "not JSON"])
def test_an_index_that_says_otherwise_than_its_files_is_refused(fault: str, tmp_path: Path) -> None:
    for k in range(2):
        save_file({f"w{k}": torch.zeros(1)}, tmp_path / f"{k}.safetensors")
    index = {"weight_map": {"w0": "0.safetensors", "w1": "1.safetensors"}}
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    assert sorted(specs_of_file(tmp_path)) == ["w0", "w1"]
    if fault == "no shard":
        (tmp_path / "1.safetensors").unlink()
    elif fault == "name elsewhere":
        file.write_text(json.dumps({"weight_map": index["weight_map"] | {"w1": "0.safetensors"}}))
    elif fault == "name besides":
        save_file({"w0": torch.zeros(1), "w2": torch.zeros(1)}, tmp_path / "0.safetensors")
    else:
        file.write_text('{"metadata": {}, "weight_map": 3}' if fault == "no map" else "{")
    assert str(tmp_path) in str(refusal(specs_of_file, tmp_path).value)


def test_an_adapter_as_peft_saves_it_is_read_with_its_configuration(tmp_path: Path) -> None:
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["to_q", "to_out.0"])
    trainer = load("tiny", "transformer")
    specs = spec_of(trainer)
    get_peft_model(trainer, config).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        spec = LoraSpec.model_validate(lora_config_of(path))
        assert spec == LoraSpec.model_validate(config)
        check_names("lora", specs_of_file(path), specs, spec)
    assert len(next(read_file(tmp_path))) == 2 * 2 * 6 * 2


def test_an_adapter_as_diffusers_saves_it_is_read_with_its_configuration(tmp_path: Path) -> None:
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["to_q"])
    trainer = load("tiny", "transformer")
    specs = spec_of(trainer)
    trainer.add_adapter(config)
    trainer.save_lora_adapter(tmp_path / "of a model")
    LTX2Pipeline.save_lora_weights(
        tmp_path / "of a pipeline",
        transformer_lora_layers=get_peft_model_state_dict(trainer),
        transformer_lora_adapter_metadata=config.to_dict(),
    )
    for path in (tmp_path / "of a model", tmp_path / "of a pipeline"):
        spec = LoraSpec.model_validate(lora_config_of(path) or {})
        assert spec == LoraSpec.model_validate(config)
        check_names("lora", specs_of_file(path), specs, spec)
