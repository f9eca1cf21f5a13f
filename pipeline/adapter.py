"""The one LoRA that a transformer carries beside its own weights, live or merged.

Layers are wrapped by diffusers and PEFT, so that a live adapter computes with the operators of a trainer's own
model. It does not know versions or digests, and checks nothing that `schemas.weights_check` has checked.

Invariants: an update of the same layers, ranks, scalings and dtype replaces no module and moves no parameter;
merging is undone by putting back copies of the weights, to the bit, never by subtracting; without an adapter
every module is the one that the transformer was made with.
"""

from collections.abc import Mapping

import torch
from diffusers import LTX2VideoTransformer3DModel
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from pipeline.tensors import write
from schemas.lora import LoraSpec, layer_of
from schemas.weights_check import listed, refused

NAME = "policy"
"""What PEFT calls the adapter."""


class Adapter:
    """An adapter slot. Its methods write to the transformer, and belong to the thread that runs it."""

    def __init__(self, transformer: LTX2VideoTransformer3DModel) -> None:
        """transformer: without adapters."""
        self.tensors: dict[str, Tensor] = {}
        """The adapter's parameters by their own names, "<layer>.lora_A.weight"; empty without one."""
        self._transformer = transformer
        self._modules = {name: isinstance(module, nn.Linear) for name, module in transformer.named_modules()}
        self._layers: dict[str, LoraLayer] = {}
        self._form: object = None
        self._kept: dict[str, Tensor] = {}

    @property
    def is_merged(self) -> bool:
        return any(layer.merged for layer in self._layers.values())

    def check_layers(self, spec: LoraSpec) -> None:
        """Raises ValueError (a Problem) where PEFT would look for an adapter in what is no linear layer."""
        others = [name for name, linear in self._modules.items() if spec.targets(name) and not linear]
        if others:
            rule = f"cannot be bound: target_modules names {listed(others)}, no linear layers"
            raise refused(rule, "name linear layers only").exception()

    def load(self, spec: LoraSpec, tensors: Mapping[str, Tensor], *, merge: bool) -> None:
        """Take the place of the adapter before, in place where it has the same form.

        tensors: by their own names, all of one dtype, which the adapter computes in. Raises ValueError (a
        Problem) where PEFT binds others than these; there is then no adapter at all.
        """
        layers = sorted({layer_of(name) for name in tensors})
        dtypes = {tensor.dtype for tensor in tensors.values()}
        form = (dtypes, [(layer, spec.rank(layer), spec.scaling(layer)) for layer in layers])
        self.unmerge()
        if form != self._form:
            self.drop()
            self._inject(spec, *dtypes)
            self._form = form
        if self.tensors.keys() != tensors.keys():
            others = sorted(self.tensors.keys() ^ tensors.keys())
            self.drop()
            rule = f"must bind one to one, {len(others)} did not: {listed(others)}"
            raise refused(rule, "compare target_modules with the names").exception()
        write(self.tensors, tensors)
        if merge:
            self.merge()
        else:
            self._kept = {}

    def merge(self) -> None:
        """Add the adapter to its layers' weights, of which copies are kept on the host."""
        for name, layer in self._layers.items():
            if name not in self._kept:
                self._kept[name] = _host_copy(layer.get_base_layer().weight)
            layer.merge(adapter_names=[NAME])

    def unmerge(self) -> None:
        """Put the layers' own weights back, to the bit; their copies are kept for the next merge."""
        merged = {name: layer for name, layer in self._layers.items() if layer.merged}
        weights = {name: layer.get_base_layer().weight for name, layer in merged.items()}
        write(weights, {name: self._kept[name] for name in merged})
        for layer in merged.values():
            layer.merged_adapters.clear()

    def forget_base(self) -> None:
        """Throw the copies away, since the weights are about to change. The adapter must not be merged."""
        assert not self.is_merged
        self._kept = {}

    def drop(self) -> None:
        """Take the adapter off and put every module back as it was."""
        self.unmerge()
        if self._layers:
            self._transformer.unload_lora()
        self.tensors, self._layers, self._form, self._kept = {}, {}, None, {}

    def unmerged(self, name: str, tensor: Tensor) -> Tensor:
        """The transformer's own tensor of that name, of which `tensor` is what the model computes with."""
        return self._kept.get(name.removesuffix(".weight"), tensor) if self.is_merged else tensor

    def wrongly_merged(self) -> list[str]:
        """Names of merged weights that are not the sum of their copy and the adapter's product. Any thread may
        ask; what it hears while another one writes means nothing."""
        layers, kept = self._layers, self._kept
        return [
            f"{name}.weight"
            for name, layer in layers.items()
            if layer.merged and name in kept and not _is_sum(layer, kept[name])
        ]

    def _inject(self, spec: LoraSpec, dtype: torch.dtype) -> None:
        config = LoraConfig(**spec.model_dump(mode="json"))
        with torch.random.fork_rng(devices=[]):  # PEFT draws initial values
            self._transformer.add_adapter(config, adapter_name=NAME)
        layers = {
            name: module
            for name, module in self._transformer.named_modules()
            if isinstance(module, LoraLayer)
        }
        tensors: dict[str, Tensor] = {}
        for name, layer in layers.items():
            layer.eval()
            for side, parts in (("A", layer.lora_A), ("B", layer.lora_B)):
                weight = parts[NAME].weight
                weight.data = weight.data.to(dtype)
                tensors[f"{name}.lora_{side}.weight"] = weight.requires_grad_(False)
        self._layers, self.tensors = layers, tensors


def _is_sum(layer: LoraLayer, own: Tensor) -> bool:
    merged = layer.get_base_layer().weight
    weight = own.to(merged.device, copy=True)
    weight += layer.get_delta_weight(NAME)
    return torch.equal(weight, merged)


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy on the host, pinned where it comes from a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
