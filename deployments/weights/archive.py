"""Published weights on disk, so that a cluster's restart does not lose them.

    <folder>/policy.json                      the versions that are kept, and the layers of each
    <folder>/run.json                         whether the fleet samples, is paused or asleep
    <folder>/layers/<version>/publication.json
    <folder>/layers/<version>/00000.safetensors ...

A layer's files are complete before policy.json names it, and policy.json is replaced whole: whatever moment the power
goes, the folder holds the old version or the new one. Nothing here knows Ray.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.torch import save_file

from pipeline.weight_files import read_file
from pipeline.weights import StoredTensor, stored, tensor_of
from schemas.control import RunOrder
from schemas.weights import Publication, TensorSpec

Arrays = dict[str, NDArray[Any]]
"""Bits of tensors by name."""


class WeightArchive:
    """The folder of one checkpoint's policies. One process writes to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layers = folder / "layers"
        self._layers.mkdir(parents=True, exist_ok=True)

    def write_chunk(
        self, version: int, index: int, arrays: Mapping[str, NDArray[Any]], specs: Mapping[str, TensorSpec]
    ) -> None:
        """Write one chunk of a layer that is on its way."""
        layer = self._layers / str(version)
        if index == 0:
            shutil.rmtree(layer, ignore_errors=True)
            layer.mkdir()
        file = layer / f"{index:05}.safetensors"
        save_file(
            {
                name: tensor_of(StoredTensor(array=array, dtype=specs[name].dtype)).clone()
                for name, array in arrays.items()
            },
            file,
        )
        _sync(file)

    def seal(self, publication: Publication) -> None:
        """All chunks of a layer are written."""
        _write(self._layers / str(publication.version) / "publication.json", publication.model_dump_json())

    def keep(self, versions: Mapping[int, tuple[int, ...]]) -> None:
        """Name the versions that there are, with their layers, and delete every other layer."""
        _write(
            self._folder / "policy.json",
            json.dumps({"versions": {str(v): list(k) for v, k in versions.items()}}),
        )
        named = {str(layer) for layers in versions.values() for layer in layers}
        for folder in self._layers.iterdir():
            if folder.name not in named:
                shutil.rmtree(folder, ignore_errors=True)

    def keep_run(self, order: RunOrder) -> None:
        """Write down whether the fleet samples."""
        _write(self._folder / "run.json", order.model_dump_json())

    def run(self) -> RunOrder | None:
        """What was written down last; None before anything was."""
        file = self._folder / "run.json"
        return RunOrder.model_validate_json(file.read_text()) if file.is_file() else None

    def versions(self) -> dict[int, tuple[int, ...]]:
        """The versions that are kept, rising, with their layers."""
        file = self._folder / "policy.json"
        if not file.is_file():
            return {}
        return {int(v): tuple(layers) for v, layers in json.loads(file.read_text())["versions"].items()}

    def publication(self, version: int) -> Publication:
        """What is said of a layer."""
        return Publication.model_validate_json((self._layers / str(version) / "publication.json").read_text())

    def chunks(self, version: int) -> Iterator[Arrays]:
        """The bytes of a layer. Raises ValueError (a Problem) that names a file that cannot be read whole."""
        for part in read_file(self._layers / str(version)):
            yield {name: stored(tensor).array for name, tensor in part.items()}


def _write(file: Path, text: str) -> None:
    """Replace a file whole."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    _sync(draft)
    os.replace(draft, file)


def _sync(file: Path) -> None:
    with file.open("rb") as written:
        os.fsync(written.fileno())
