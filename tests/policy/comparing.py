"""What must be equal between two policies, or in one before and after."""

import gc
import sys

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


def num_tensors(policy: Policy) -> int:
    """Tensors that the policy holds on to, by whatever way, or a module of the pipeline does: not those of whoever else runs
    in this process."""
    namespaces = {name: vars(module) for name, module in [*sys.modules.items()]}
    held = [policy, *(names for name, names in namespaces.items() if name.startswith("pipeline."))]
    seen = {id(names) for names in namespaces.values()}
    found = 0
    while held:
        for thing in gc.get_referents(held.pop()):
            if id(thing) not in seen:
                seen.add(id(thing))
                held.append(thing)
                found += issubclass(type(thing), Tensor)
    return found
