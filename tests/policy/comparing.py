"""What must be equal between two policies, or in one before and after."""

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from pipeline.policy import Policy
from pipeline.weights import digests_of, stored


def bits(policy: Policy) -> dict[str, str]:
    """Digests of all that the model computes with."""
    model = policy._transformer
    return digests_of({name: stored(tensor) for name, tensor in model.state_dict().items()})


def assert_same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def addresses(model: LTX2VideoTransformer3DModel) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
