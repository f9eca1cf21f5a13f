"""The transformer's weights as they are swapped under the engine: which version they are, and that they are it.

Knows neither where an update comes from nor when it may be applied. The order of versions is the publisher's:
the same updates one after another make the same policy on every replica of one checkpoint.

Invariants:
* An update is compared with the model, both ways, before the first byte of it is written.
* Writing is copying in place: parameters stay where they are, as long as the adapter's form does not change.
* `version` and `digest` name what the model holds, or `is_intact` is False.
"""

import threading
from collections.abc import Mapping

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from pipeline.adapter import Adapter
from pipeline.residence import move
from pipeline.tensors import write
from pipeline.weights import (
    NUM_THREADS,
    StoredTensor,
    check_finite,
    chunks_of,
    digests_of,
    named_tensors,
    spec_of,
    specs_of,
    tensor_of,
)
from schemas.lora import LoraSpec, adapter_name
from schemas.weights import Publication, weights_digest
from schemas.weights_check import check_names, listed, refused


class Policy:
    """A transformer's weights and their version.

    `apply`, `to_host` and `to_device` belong to the thread that runs the model, between two forward passes;
    `check` and `verify` to any other, at any time.
    """

    def __init__(
        self, transformer: LTX2VideoTransformer3DModel, *, version: int = 0, num_threads: int = NUM_THREADS
    ) -> None:
        """Hashes every tensor. transformer: without adapters, else ValueError."""
        if getattr(transformer, "peft_config", None):
            raise ValueError(
                f"transformer must have no adapter, got {', '.join(transformer.peft_config)};"
                " load the checkpoint's own weights, and publish the adapter"
            )
        self.version = version
        """Version of the last update that was applied."""
        self.spec = spec_of(transformer)
        """Dtype and shape of each of the transformer's own tensors."""
        self.is_intact = True
        """False while an update is being written, and after one that failed midway, until a full one is
        applied: nothing may be sampled then."""
        self._transformer, self._num_threads = transformer, num_threads
        self._tensors = named_tensors(transformer)
        self._adapter = Adapter(transformer)
        self._lora: LoraSpec | None = None
        self._digests = self._digests_in_model(self._tensors)
        self._adapter_digests: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self._num_applied = 0
        self._home: torch.device | None = None
        self._at_rest = threading.Lock()
        """Held by whatever needs the tensors to stay on the device they are on."""
        self.digest = weights_digest(self._digests)
        """`weights_digest` of what the model computes with."""
        self.base_digest = self.digest
        """`weights_digest` of the checkpoint's own weights, which updates lie on."""

    def check(self, publication: Publication, tensors: Mapping[str, StoredTensor]) -> None:
        """Raises ValueError (a Problem) for all that can be wrong with an update. Touches nothing, and reads
        every byte.

        Beside what `check_names` finds: tensors that are not those the publication speaks of, layers that PEFT
        cannot wrap, bytes that have changed since they were published, and values that are not finite.
        """
        self._check_names(publication, tensors)
        digests = digests_of(tensors, self._num_threads)
        changed = [name for name in tensors if digests[name] != publication.digests[name]]
        if changed:
            rule = f"must have the bytes that were published, {len(changed)} have not ({listed(changed)})"
            raise refused(rule, "publish them again").exception()
        check_finite(tensors, self._num_threads)

    def apply(self, publication: Publication, tensors: Mapping[str, StoredTensor]) -> None:
        """Write an update into the model, in one pass over the tensors. Names, shapes and dtypes are compared before;
        what `check` reads every byte for is not.

        full replaces every tensor and drops the adapter; partial keeps the adapter, merged again where it was;
        lora replaces the adapter. Raises for names as `check` does, and then the policy is as it was.
        """
        assert self._home is None, "the weights are on the host: to_device first"
        self._check_names(publication, tensors)
        was_intact, self.is_intact = self.is_intact, False
        self._written = {}
        self._num_applied += 1  # after _written, as verify reads them in the other order
        values = {name: tensor_of(tensor) for name, tensor in tensors.items()}
        with torch.inference_mode(False), torch.no_grad():
            if publication.lora_config is not None:
                self._write_adapter(publication, publication.lora_config, values)
            else:
                self._write_own(publication, values)
        self.version = publication.version
        self.digest = weights_digest(
            self._digests, self._adapter_digests, self._lora, self._adapter.is_merged
        )
        self.is_intact = was_intact or publication.update == "full"

    def verify(self) -> list[str]:
        """Names of the tensors in the model whose bytes differ from what the last `apply` was to write.

        Of a merged adapter its factors are compared, and each merged weight with the sum that it should be.
        None is named before the first apply, after a failed one (see `is_intact`), nor where another one began
        meanwhile: that is to be verified by itself.
        """
        with self._at_rest:
            started = self._num_applied
            written = self._written
            if not written:
                return []
            own = {name: self._adapter.unmerged(name, tensor) for name, tensor in self._tensors.items()}
            held = {name: tensor for name, tensor in (own | self._adapter.tensors).items() if name in written}
            found = self._digests_in_model(held)
            wrong = [name for name, digest in written.items() if found.get(name) != digest]
            wrong += self._adapter.wrongly_merged()
            return wrong if self._num_applied == started else []

    def to_host(self) -> None:
        """Sleep: move every parameter and buffer to pinned host memory and free the device. Twice is once."""
        with self._at_rest:
            if self._home is None:
                device = torch.device(self._transformer.device)
                move(self._transformer, torch.device("cpu"))
                self._home = device

    def to_device(self) -> None:
        """Wake: move everything back to where it was, with the same bits. Twice is once."""
        with self._at_rest:
            if self._home is not None:
                move(self._transformer, self._home)
                self._home = None

    def _check_names(self, publication: Publication, tensors: Mapping[str, StoredTensor]) -> None:
        specs = specs_of(tensors)
        if specs != publication.tensors:
            names = sorted(specs.keys() | publication.tensors.keys())
            others = [name for name in names if specs.get(name) != publication.tensors.get(name)]
            rule = f"must be those that the publication speaks of, {len(others)} are not ({listed(others)})"
            raise refused(rule, "send all of it, and nothing else").exception()
        check_names(publication.update, specs, self.spec, publication.lora_config)
        if publication.lora_config is not None:
            self._adapter.check_layers(publication.lora_config)

    def _write_own(self, publication: Publication, values: Mapping[str, Tensor]) -> None:
        is_full = publication.update == "full"
        merged = self._adapter.is_merged and not is_full
        self._adapter.unmerge()
        self._adapter.forget_base()
        if is_full:
            self._adapter.drop()
            self._lora, self._adapter_digests = None, {}
        write(self._tensors, values)
        if merged:
            self._adapter.merge()
        self._digests = self._digests | publication.digests
        self._written = publication.digests

    def _write_adapter(self, publication: Publication, spec: LoraSpec, values: Mapping[str, Tensor]) -> None:
        own = {name: adapter_name(name) or name for name in values}
        self._adapter.load(spec, {own[name]: v for name, v in values.items()}, merge=publication.merge)
        self._lora = spec
        self._adapter_digests = {own[name]: publication.digests[name] for name in values}
        self._written = self._adapter_digests

    def _digests_in_model(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """By way of the host, chunk by chunk."""
        return {
            name: digest
            for chunk in chunks_of(tensors)
            for name, digest in digests_of(chunk, self._num_threads).items()
        }
