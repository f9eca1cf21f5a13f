"""A publication of weights: all that is said of one update of the policy besides its bytes.

A publication updates the transformer and nothing else: `full` brings every tensor, `partial` some of them,
`lora` an adapter beside them. Names are those of the checkpoint; an adapter's may stand in PEFT's
form or in diffusers'.

Knows neither torch nor where tensors are kept: a tensor is a name, a dtype, a shape and a digest of its bytes.

Invariant: a `Publication` goes through JSON and comes back equal.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Literal, Self

import xxhash
from pydantic import Field, model_validator

from schemas.errors import invalid
from schemas.fields import Bool, Contract, Count, Indices
from schemas.lora import LoraSpec

Update = Literal["full", "partial", "lora"]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""xxh3_128 of a tensor's bytes, little-endian and contiguous, in hex."""


class TensorSpec(Contract):
    """What is known of a tensor without its bytes."""

    dtype: str
    """torch's name of it, "bfloat16"."""
    shape: Indices
    """Its sizes; () of a scalar."""


class PublicationHeader(Contract):
    """What is said of one update before its tensors."""

    version: Count
    """The policy's version from this update on; 0 is the checkpoint's own weights."""
    update: Update
    """full: every tensor of the transformer, and no adapter any more. partial: the tensors named, and an
    adapter stays. lora: an adapter in place of the one before; the transformer's own tensors stay."""
    merge: Bool = False
    """lora only. False: computed beside the layers, with the bits of the trainer's own forward pass. True:
    added to their weights, which is faster and differs by about 1e-6 (float32)."""
    lora_config: LoraSpec | None = None
    """lora only, and required there: PEFT's configuration."""

    @model_validator(mode="after")
    def _fits_its_update(self) -> Self:
        if (self.lora_config is not None) != (self.update == "lora"):
            rule = (
                f"{'is required' if self.update == 'lora' else 'cannot be given'} with update {self.update}"
            )
            raise invalid(
                "lora_config", None, rule, "a state dict alone has no alpha; send PEFT's LoraConfig"
            ).refusal()
        if self.merge and self.update != "lora":
            raise invalid("merge", True, f"has no effect with update {self.update}", "leave it out").refusal()
        return self


class Publication(PublicationHeader):
    """All that is said of one update besides its bytes."""

    tensors: dict[str, TensorSpec]
    """By the names they were published under."""
    digests: dict[str, Digest]
    """Of each tensor's bytes, taken where it was published."""

    @property
    def identity(self) -> str:
        """32 hex digits; equal where every byte of the update is."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return str(xxhash.xxh3_128_hexdigest(canonical.encode()))

    @model_validator(mode="after")
    def _has_a_digest_of_each(self) -> Self:
        if self.tensors.keys() != self.digests.keys():
            others = sorted(self.tensors.keys() ^ self.digests.keys())
            rule = "must be of the tensors and of no others"
            raise invalid("digests", others[0], rule, "hash each tensor that is published").refusal()
        return self


def weights_digest(
    tensors: Mapping[str, str],
    adapter: Mapping[str, str] | None = None,
    lora_config: LoraSpec | None = None,
    merged: bool = False,
) -> str:
    """32 hex digits of a policy: equal where every byte of it is, and the adapter's configuration and mode.

    tensors: the digest of each of the transformer's own tensors; adapter: of the adapter's, if there is one, by
    their own names (`adapter_name`).
    """
    lines = [f"{name} {digest}" for name, digest in sorted(tensors.items())]
    if adapter:
        assert lora_config is not None
        lines += [f"adapter {name} {digest}" for name, digest in sorted(adapter.items())]
        lines += [lora_config.model_dump_json(), f"merged {merged}"]
    return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
