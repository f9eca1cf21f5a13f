"""The two ways to read a stored array: ``frozen`` shares its memory and refuses writes, ``owned`` copies it."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.tensors import dtype_of, frozen, name_of, owned, to_numpy, write

IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda tensor: tensor.mul_(2),
    "copy_": lambda tensor: tensor.copy_(torch.zeros_like(tensor)),
    "write": lambda tensor: write({"name": tensor}, {"name": torch.zeros_like(tensor)}),
    "zero_": lambda tensor: tensor.zero_(),
    "setitem": lambda tensor: tensor.__setitem__(0, 0),
    "a view's add_": lambda tensor: tensor[0].add_(1),
    "out=": lambda tensor: torch.add(tensor, 1, out=tensor),
}


def stored(dtype: str = "float32") -> np.ndarray:
    """As it is read from the object store: read-only, over memory that is not."""
    view = np.arange(6).reshape(2, 3).astype(dtype).view()
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_writing_to_a_frozen_tensor_raises_and_changes_nothing(
    change: Callable[[Tensor], object], mode: Callable[[], AbstractContextManager[None]]
) -> None:
    array = stored()
    tensor = frozen(array)
    with mode(), pytest.raises(RuntimeError):
        change(tensor)
    assert np.array_equal(array, stored())


def test_nor_can_bfloat16_bits_be_written_through_their_view() -> None:
    bits = stored("uint16")
    with pytest.raises(RuntimeError):
        frozen(bits, "bfloat16").zero_()
    assert np.array_equal(bits, stored("uint16"))


def test_a_frozen_tensors_memory_is_not_handed_on_as_writable() -> None:
    with pytest.raises(RuntimeError):
        frozen(stored()).numpy()
    assert frozen(stored()).clone().numpy().tolist() == stored().tolist()


def test_a_frozen_tensor_shares_its_arrays_memory() -> None:
    array = np.zeros((2, 3), np.float32)
    tensor = frozen(array)
    array[:] = stored()
    assert tensor.tolist() == stored().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_ops_of_a_transformer_read_a_frozen_tensor(dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 2, 64).reshape(8, 8).to(dtype)
    tensor = frozen(to_numpy(values), name_of(dtype))
    weight = torch.eye(8, dtype=dtype)
    for op in (
        lambda x: torch.stack([x, x]),
        lambda x: x[2:4].float(),
        lambda x: functional.linear(x, weight),
        lambda x: functional.rms_norm(x, (8,)),
        lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: torch.isfinite(x).all(),
    ):
        assert torch.equal(op(tensor), op(values))


def test_what_is_computed_from_a_frozen_tensor_may_be_written() -> None:
    assert (frozen(stored()) + 0).mul_(2).sum() == 30
    assert frozen(stored()).clone().mul_(2).sum() == 30


def test_a_frozen_tensor_may_stand_where_gradients_flow() -> None:
    weight = torch.ones(3, requires_grad=True)
    (frozen(stored()) * weight).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 5.0, 7.0]


def test_freezing_a_read_only_array_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen(stored())
        owned(stored())


def test_an_owned_tensor_is_a_copy_that_may_be_written_and_differentiated() -> None:
    array = stored()
    tensor = owned(array)
    assert tensor.data_ptr() != array.ctypes.data
    tensor.mul_(2)
    assert np.array_equal(array, stored())
    tensor.requires_grad_().sum().backward()
    assert tensor.grad is not None


def test_an_owned_tensor_of_a_writable_array_is_a_copy_too() -> None:
    array = stored().copy()
    owned(array).zero_()
    assert np.array_equal(array, stored())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tensors_bits_come_back_through_numpy(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -3.14159, 1e-30, 65504.0, float("inf")]).to(dtype)
    array = to_numpy(values)
    assert array.dtype == ("uint16" if dtype == torch.bfloat16 else name_of(dtype))
    for back in (frozen(array, name_of(dtype)), owned(array, torch_dtype=name_of(dtype))):
        assert back.dtype == dtype
        assert torch.equal(back.view(torch.uint8), values.view(torch.uint8))


def test_every_bfloat16_there_is_comes_back_with_its_bits() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    assert np.array_equal(to_numpy(owned(bits, torch_dtype="bfloat16")), bits)
    assert np.array_equal(to_numpy(frozen(bits, "bfloat16").clone()), bits)


def test_what_is_not_contiguous_arrives_so() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).T
    array = to_numpy(transposed)
    assert array.flags.c_contiguous and np.array_equal(array, transposed.numpy())


def test_a_gradient_does_not_hinder_the_way_to_numpy() -> None:
    assert to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["nothing", "nn", "torch.float32"])
def test_a_name_that_is_no_dtypes_is_refused_with_the_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"got '{name}'"):
        dtype_of(name)
