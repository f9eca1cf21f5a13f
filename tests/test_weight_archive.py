"""Weights on disk: what was kept comes back to the byte, and what was cut off halfway is not there or is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.weights.archive import WeightArchive
from pipeline.weights import StoredTensor, digests_of
from schemas.errors import Problem
from schemas.weights import Publication, TensorSpec

SPECS = {
    "a.weight": TensorSpec(dtype="float32", shape=(2, 3)),
    "b.weight": TensorSpec(dtype="bfloat16", shape=(4,)),
}
ARRAYS: dict[str, Any] = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": np.array([1, 2, 3, 65535], dtype=np.uint16),
}


def publication(version: int) -> Publication:
    stored = {name: StoredTensor(array=array, dtype=SPECS[name].dtype) for name, array in ARRAYS.items()}
    return Publication(version=version, update="full", tensors=SPECS, digests=digests_of(stored))


def write(archive: WeightArchive, version: int) -> None:
    for index, name in enumerate(ARRAYS):
        archive.write_chunk(version, index, {name: ARRAYS[name]}, SPECS)
    archive.seal(publication(version))


def test_what_was_kept_comes_back_to_the_byte(tmp_path: Path) -> None:
    archive = WeightArchive(tmp_path)
    write(archive, 7)
    archive.keep({7: (7,)})
    again = WeightArchive(tmp_path)
    assert again.versions() == {7: (7,)}
    assert again.publication(7) == publication(7)
    found = {name: array for chunk in again.chunks(7) for name, array in chunk.items()}
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes()


def test_a_layer_that_was_not_kept_is_not_there_and_goes_with_the_next(tmp_path: Path) -> None:
    archive = WeightArchive(tmp_path)
    write(archive, 1)
    archive.keep({1: (1,)})
    archive.write_chunk(2, 0, {"a.weight": ARRAYS["a.weight"]}, SPECS)  # and the power goes
    again = WeightArchive(tmp_path)
    assert again.versions() == {1: (1,)}
    write(again, 3)
    again.keep({1: (1,), 3: (3,)})
    assert sorted(folder.name for folder in (tmp_path / "layers").iterdir()) == ["1", "3"]
    again.keep({3: (3,)})
    assert [folder.name for folder in (tmp_path / "layers").iterdir()] == ["3"]


def test_a_chunk_of_an_attempt_before_does_not_stay(tmp_path: Path) -> None:
    archive = WeightArchive(tmp_path)
    write(archive, 1)
    archive.write_chunk(1, 0, {"a.weight": ARRAYS["a.weight"]}, SPECS)
    assert [sorted(chunk) for chunk in archive.chunks(1)] == [["a.weight"]]


def test_a_file_that_was_cut_off_is_refused_by_its_name(tmp_path: Path) -> None:
    archive = WeightArchive(tmp_path)
    write(archive, 1)
    file = tmp_path / "layers" / "1" / "00001.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError) as refusal:
        list(archive.chunks(1))
    problem = Problem.of(refusal.value)
    assert problem is not None and str(file) in str(problem.value)
