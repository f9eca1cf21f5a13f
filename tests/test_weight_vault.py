"""Publications on their way: whole or not at all, one at a time, and never the parts of two in one."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.settings import WeightSettings
from deployments.weights import vault as weight_vault
from deployments.weights.archive import WeightArchive
from deployments.weights.vault import WeightVault
from schemas.errors import Problem
from schemas.weights import TensorSpec

TARGET = {name: TensorSpec(dtype="float32", shape=(4,)) for name in ("a", "b")}
DIGEST = "0" * 32


def header(version: int, update: str = "full") -> dict[str, Any]:
    return {"version": version, "update": update, "merge": False, "lora_config": None}


def vault_of(folder: Path | None = None, **settings: Any) -> WeightVault:
    """Whose chunks stay in this process."""
    return WeightVault(WeightSettings(**settings), lambda arrays: arrays, folder)


async def send(vault: WeightVault, ticket: str, *names: str, value: float = 1.0) -> None:
    for name in names:
        arrays = {name: np.full(4, value, np.float32)}
        await vault.add(ticket, {name: TARGET[name]}, {name: DIGEST}, arrays)


async def publish(vault: WeightVault, version: int, value: float = 1.0) -> None:
    ticket = vault.begin(header(version), TARGET, TARGET, 32)
    await send(vault, ticket, "a", "b", value=value)
    await vault.complete(ticket, 10)
    await vault.put_in_place(ticket)


def values(vault: WeightVault) -> dict[str, float]:
    layers = vault.layers(0, vault.version)
    return {
        name: float(array[0]) for layer in layers for chunk in layer.chunks for name, array in chunk.items()
    }


def refusal_of(error: BaseException) -> str:
    problem = Problem.of(error)
    assert problem is not None and problem.code == "weights_refused"
    return str(problem)


def test_a_publication_is_the_policy_once_it_is_put_in_place_and_not_before() -> None:
    async def test() -> None:
        vault = vault_of()
        assert (vault.version, vault.newest()) == (0, None)
        ticket = vault.begin(header(3), TARGET, None, None)
        await send(vault, ticket, "a", "b")
        await vault.complete(ticket, 10)
        assert vault.version == 0 and vault.incoming_version == 3
        assert [layer.version for layer in vault.layers(0, 3)] == [3], "to be staged"
        await vault.put_in_place(ticket)
        assert vault.version == 3 and vault.incoming_version is None
        assert values(vault) == {"a": 1.0, "b": 1.0}

    asyncio.run(test())


def test_what_lacks_a_part_is_refused_when_it_should_be_whole() -> None:
    async def test() -> None:
        vault = vault_of()
        ticket = vault.begin(header(1), TARGET, None, None)
        await send(vault, ticket, "a")
        with pytest.raises(ValueError) as refusal:
            await vault.complete(ticket, 10)
        assert "1 missing (b)" in refusal_of(refusal.value)
        with pytest.raises(ValueError) as refusal:
            await send(vault, ticket, "a")
        assert "got a twice" in refusal_of(refusal.value)

    asyncio.run(test())


def test_parts_of_a_try_that_was_given_up_do_not_get_into_the_next() -> None:
    async def test() -> None:
        vault = vault_of()
        first = vault.begin(header(1), TARGET, None, None)
        await send(vault, first, "a", value=1.0)
        vault.give_up(first)
        second = vault.begin(header(1), TARGET, None, None)
        with pytest.raises(ValueError) as refusal:
            await send(vault, first, "b", value=1.0)
        assert "publish it again" in refusal_of(refusal.value)
        vault.give_up(first)  # late, and nobody's affair any more
        await send(vault, second, "a", "b", value=2.0)
        await vault.complete(second, 10)
        await vault.put_in_place(second)
        assert values(vault) == {"a": 2.0, "b": 2.0}

    asyncio.run(test())


def test_a_trainer_that_falls_silent_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_vault, "PART_DEADLINE_S", 0.05)

    async def test() -> None:
        vault = vault_of()
        vault.begin(header(1), TARGET, None, None)
        assert vault.incoming_version == 1
        await asyncio.sleep(0.06)
        assert vault.incoming_version is None

    asyncio.run(test())


def test_an_iterators_parts_are_refused_as_soon_as_they_do_not_fit() -> None:
    async def test() -> None:
        vault = vault_of(max_bytes=20)
        ticket = vault.begin(header(1), TARGET, None, None)
        await send(vault, ticket, "a")
        with pytest.raises(ValueError) as refusal:
            await send(vault, ticket, "b")
        assert "weights.max_bytes is 20" in refusal_of(refusal.value)
        with pytest.raises(ValueError) as refusal:
            vault.begin(header(1), TARGET, TARGET, 32)
        assert "32 bytes" in refusal_of(refusal.value)

    asyncio.run(test())


def test_a_vault_comes_back_from_its_folder_with_the_version_that_was_put_in_place(tmp_path: Path) -> None:
    async def test() -> None:
        vault = vault_of(tmp_path)
        for version in (1, 2, 5):
            await publish(vault, version, value=float(version))
        ticket = vault.begin(header(6), TARGET, None, None)
        await send(vault, ticket, "a", "b", value=6.0)
        await vault.complete(ticket, 10)  # and the power goes
        again = vault_of(tmp_path)
        assert again.version == 5 and again.versions == (2, 5)
        assert again.newest() == vault.newest()
        assert values(again) == {"a": 5.0, "b": 5.0}

    asyncio.run(test())


def test_what_is_being_put_in_place_cannot_be_given_up_and_nothing_else_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        vault = vault_of(tmp_path, keep_versions=1)
        await publish(vault, 1)
        keep, seen = WeightArchive.keep, []

        def keeping(archive: WeightArchive, versions: Any) -> None:
            vault.give_up(ticket)
            seen.append(vault.incoming_version)
            keep(archive, versions)
            if 1 not in versions:
                raise OSError("the disk is gone")

        monkeypatch.setattr(WeightArchive, "keep", keeping)
        ticket = vault.begin(header(2), TARGET, None, None)
        await send(vault, ticket, "a", "b", value=2.0)
        await vault.complete(ticket, 10)
        await vault.put_in_place(ticket)
        assert seen == [2, 2] and vault.incoming_version is None
        assert values(vault) == {"a": 2.0, "b": 2.0}, "what could not be deleted changes nothing"

    asyncio.run(test())


def test_a_version_that_was_let_go_is_said_to_be() -> None:
    async def test() -> None:
        vault = vault_of(keep_versions=1)
        for version in (1, 2):
            await publish(vault, version)
        with pytest.raises(RuntimeError, match="not in the weight store any more"):
            vault.layers(0, 1)

    asyncio.run(test())
