"""A group and its policy version: sampled anew on a newer one, or of one version and no other. No cluster."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ObjectLostError

from configs.settings import ClientSettings
from deployments.conductor import Conductor
from deployments.group import RolloutGroup
from deployments.handles import Handles
from schemas.card import ModelCard
from schemas.errors import Problem
from schemas.resolve import resolve

PREFIXED = {"shared_prefix": True, "shared_initial_noise": True, "stochastic_steps": [3, 4]}


class Scripted(Conductor):
    """Whose denoisers sample from ``current``, refuse what is bound to an earlier version, and do ``first`` before."""

    def __init__(self, card: ModelCard, first: Callable[[dict[str, Any]], Any]) -> None:
        names = {"text_encoder": "encoder", "denoiser": "denoiser", "av_decoder": "decoder"}
        handles = cast(Handles, SimpleNamespace(**names))
        super().__init__(
            handles, card, ClientSettings(), "lease", lambda: cast(Any, self), wait_when_full=True
        )
        self.version, self._first = 0, first

    @property
    def current(self) -> Any:
        """The store's method."""

        async def remote(at_least: int, timeout_s: float) -> int:
            return self.version

        return SimpleNamespace(remote=remote)

    async def _call(self, handle: Any, *args: Any, **kwargs: Any) -> Any:
        if handle != "denoiser":
            return "conditioning"
        order = args[1]
        await self._first(order)
        if order["policy_version"] is not None and order["policy_version"] < self.version:
            raise Problem(code="policy_version_gone", rule="the replica has moved on").exception()
        return f"{order['until']} of version {self.version}"


@pytest.fixture
def group_of(card: ModelCard) -> Callable[..., RolloutGroup]:
    def group_of(**request: Any) -> RolloutGroup:
        asked = {"prompt": "a", "num_samples": 2, "media": False, **request}
        group = RolloutGroup(resolve(asked, card), lambda _: None)
        group.collecting.set()
        return group

    return group_of


def dies_once(conductor: list[Scripted], group: RolloutGroup, *, begun: bool) -> Callable[..., Any]:
    """Of sample 1: a version is published, and its replica dies."""
    left = [True]

    async def first(order: dict[str, Any]) -> None:
        if order["sample_index"] != 1 or not left:
            return
        left.clear()
        assert group.binding is not None
        if begun:
            group.binding.note_begun(1)
        await asyncio.sleep(0.1)
        conductor[0].version = 1
        raise Problem(code="replica_died", rule="it died").exception()

    return first


@pytest.mark.parametrize("mixed", [False, True], ids=["one version", "any version"])
def test_a_group_of_which_samples_may_be_out_does_not_go_on_with_another_version(
    mixed: bool, card: ModelCard, group_of: Callable[..., RolloutGroup]
) -> None:
    group = group_of(allow_mixed_versions=mixed)
    conductor: list[Scripted] = []
    conductor.append(Scripted(card, dies_once(conductor, group, begun=True)))
    asyncio.run(conductor[0].run(group))
    first, second = group.samples
    assert cast(Any, first.trajectory) == "None of version 0"
    if mixed:
        assert cast(Any, second.trajectory) == "None of version 1"
    else:
        assert group.policy_version == 0 and second.trajectory is None
        assert second.problem is not None and second.problem.code == "policy_version_gone"


def test_a_group_of_which_none_is_out_is_sampled_anew(
    card: ModelCard, group_of: Callable[..., RolloutGroup]
) -> None:
    group = group_of()
    conductor: list[Scripted] = []
    conductor.append(Scripted(card, dies_once(conductor, group, begun=False)))
    asyncio.run(conductor[0].run(group))
    assert group.policy_version == 1 and not group.problems
    assert {cast(Any, sample.trajectory) for sample in group.samples} == {"None of version 1"}


def test_a_prefix_that_cannot_be_made_again_takes_the_group_to_the_newer_version(
    card: ModelCard, group_of: Callable[..., RolloutGroup]
) -> None:
    group, left = group_of(**PREFIXED), [True]

    async def lost_once(order: dict[str, Any]) -> None:
        if order["until"] is None and left:
            left.clear()
            conductor.version = 1
            raise ObjectLostError("ab", None, "here")

    conductor = Scripted(card, lost_once)
    asyncio.run(conductor.run(group))
    assert group.policy_version == 1 and not group.problems
    assert {cast(Any, sample.trajectory) for sample in group.samples} == {"None of version 1"}
