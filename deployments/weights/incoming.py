"""A publication on its way into the store: what has come so far, and whether it can still become whole.

It knows no Ray: what a chunk is, is the store's to say.
"""

from collections.abc import Mapping
from typing import Any

from deployments.weights.shelf import Layer
from schemas.lora import LoraSpec
from schemas.validation import validated
from schemas.weights import Publication, TensorSpec
from schemas.weights_check import check_names, refused

NO_DIGEST = "0" * 32


class Incoming:
    """``header`` holds version, update, merge and lora_config; ``target`` is what the transformer has."""

    def __init__(
        self, header: Mapping[str, Any], target: Mapping[str, TensorSpec], *, ticket: str, expires_at: float
    ) -> None:
        self.version = int(header["version"])
        self.ticket = ticket
        """Tells it from another attempt at the same version."""
        self.expires_at = expires_at
        self.is_landing = False
        """Whether it is being put in place."""
        self.chunks: list[Any] = []
        self.num_bytes = 0
        self._header, self._target = header, target
        self._tensors: dict[str, TensorSpec] = {}
        self._digests: dict[str, str] = {}
        config = header["lora_config"]
        self._lora_config = None if config is None else validated(LoraSpec, config)

    def check_beforehand(self, tensors: Mapping[str, TensorSpec]) -> None:
        """All that can be said of the whole before a byte has come. Raises ValueError (a Problem)."""
        stand_ins = dict.fromkeys(tensors, NO_DIGEST)
        self._check(validated(Publication, {**self._header, "tensors": dict(tensors), "digests": stand_ins}))

    def check_part(self, tensors: Mapping[str, TensorSpec]) -> None:
        """All that can be said of one chunk. Raises ValueError (a Problem)."""
        twice = sorted(tensors.keys() & self._tensors.keys())
        if twice:
            raise refused(f"must name each tensor once, got {twice[0]} twice", "send it once").exception()
        check_names(self._header["update"], tensors, self._target, self._lora_config, complete=False)

    def take(
        self, tensors: Mapping[str, TensorSpec], digests: Mapping[str, str], chunk: Any, num_bytes: int
    ) -> None:
        """One chunk more."""
        self._tensors |= tensors
        self._digests |= digests
        self.chunks.append(chunk)
        self.num_bytes += num_bytes

    def check_whole(self) -> Publication:
        """The publication, now that all has come. Raises ValueError (a Problem) when something is missing."""
        publication = self.layer().publication
        self._check(publication)
        return publication

    def layer(self) -> Layer:
        """What lies on the policy from then on."""
        whole = {**self._header, "tensors": self._tensors, "digests": self._digests}
        return Layer(
            publication=validated(Publication, whole), chunks=tuple(self.chunks), num_bytes=self.num_bytes
        )

    def _check(self, publication: Publication) -> None:
        check_names(publication.update, publication.tensors, self._target, publication.lora_config)
