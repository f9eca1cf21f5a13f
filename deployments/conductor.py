"""Runs the graph for a client: bind each group to a policy version, encode its prompt once, denoise and decode each
sample, by reference, with retries.

No tensor passes through this process: a call's result is passed on as the ref of an object that this process owns.
Confined to one event loop. It knows no threads and no public API; `deployments.client` is its face.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayError
from ray.serve.handle import DeploymentHandle

from configs.settings import ClientSettings
from deployments.binding import Binding, VersionGone
from deployments.budget import ByteBudget
from deployments.calls import finished_ref, problem_of, replica_died
from deployments.group import RolloutGroup, RolloutSample
from deployments.handles import Handles
from deployments.task_group import task_group
from deployments.troubles import cancelled, never_published, out_of_time
from schemas.card import ModelCard
from schemas.errors import Problem
from schemas.order import SampleOrder
from schemas.resolve import media_bytes, num_rows, trajectory_bytes
from schemas.resolved import ResolvedRequest, first_stochastic_step

logger = logging.getLogger(__name__)

DEADLINE_GRACE_S = 2.0
"""How much longer than a request's deadline the client waits, so that the denoiser's own word comes first."""

STORE_PAUSE_S = 0.2
"""Between two tries at a weight store that does not answer."""

FULL_QUEUE_PAUSE_S = 0.2
"""Between two tries at a deployment whose queue is full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What the samples of a group are made from."""

    group: RolloutGroup
    conditioning: ray.ObjectRef
    """Conditioning table, owned by this process."""
    prefix: ray.ObjectRef | None
    """Table of the steps that the group shares; None where it shares none."""
    encode_s: float
    """How long the conditioning took."""
    binding: Binding
    """The policy version that the samples are of."""
    deadline: float
    """Moment of ``time.monotonic`` at which the group is given up."""


class Conductor:
    """Takes groups through the graph. ``wait_when_full``: whether a full queue is waited for or is the answer."""

    def __init__(
        self,
        handles: Handles,
        card: ModelCard,
        settings: ClientSettings,
        lease_id: str,
        weight_store: Callable[[], ActorHandle],
        *,
        wait_when_full: bool,
    ) -> None:
        self.budget = ByteBudget(settings.max_bytes_in_flight)
        self._handles, self._card, self._settings = handles, card, settings
        self._lease_id = lease_id
        self._weight_store = weight_store
        self._wait_when_full = wait_when_full

    async def run(self, group: RolloutGroup) -> None:
        """Settle every sample of the group: done, failed, out of time, or cancelled. Never raises."""
        deadline = time.monotonic() + group.request.deadline_s
        try:
            async with asyncio.timeout(group.request.deadline_s + DEADLINE_GRACE_S):
                await self._run(group, deadline)
        except TimeoutError as error:
            self._fail_rest(group, Problem.of(error) or out_of_time(group))
        except asyncio.CancelledError:
            self._fail_rest(group, cancelled())
        except Exception as error:
            self._fail_rest(group, problem_of(error))
        finally:
            group.settled.set_result(None)

    def handed_over(self, sample: RolloutSample) -> None:
        """Somebody has taken a sample that was not yet waited for when it was done."""
        if sample.done:
            self.budget.leave(self._num_bytes(sample))

    async def _run(self, group: RolloutGroup, deadline: float) -> None:
        """Sample the group on one policy version; from the start again when that is replaced before all have begun."""
        while True:
            binding = await self._bind(group, deadline)
            try:
                try:
                    inputs = await self._make_inputs(group, deadline, binding)
                except Exception as error:
                    raise binding.gone() if _version_gone(error) else error from None
                async with task_group() as tasks:
                    for sample in group.samples:
                        if not sample.settled.done():
                            tasks.create_task(self._run_sample(sample, inputs))
            except* VersionGone:
                logger.info("group %s goes on with a newer policy version", group.group_id)
            if not binding.is_gone:
                return

    async def _bind(self, group: RolloutGroup, deadline: float) -> Binding:
        """The present version, once it is what the request asks for."""
        request = group.request
        while True:
            seconds_left = deadline - time.monotonic()
            try:
                store = await asyncio.to_thread(self._weight_store)
                version = await store.current.remote(request.min_policy_version, max(0.0, seconds_left))
                break
            except RayError as error:
                if isinstance(error, TimeoutError) or seconds_left <= 0:
                    asked_for = request.min_policy_version > 0
                    raise (never_published(group) if asked_for else out_of_time(group)).exception() from None
                logger.warning("the weight store did not answer (%r); trying again", error)
                await asyncio.sleep(STORE_PAUSE_S)
        bound = None if request.allow_mixed_versions else int(version)
        group.policy_version = bound
        unsettled = [sample for sample in group.samples if not sample.settled.done()]
        for sample in unsettled:
            sample.sample_id = ""  # late news of an attempt on another version must not count for this one
        group.binding = Binding(bound, [sample.sample_index for sample in unsettled])
        return group.binding

    async def _make_inputs(self, group: RolloutGroup, deadline: float, binding: Binding) -> Inputs:
        """What the group's samples have in common: the conditioning, and the prefix where they share one."""
        request, started = group.request, time.monotonic()
        encoder = self._handles.text_encoder
        conditioning = await self._retry(
            partial(self._call, encoder, request.prompt, request.negative_prompt)
        )
        inputs = Inputs(
            group=group,
            conditioning=conditioning,
            prefix=None,
            encode_s=time.monotonic() - started,
            binding=binding,
            deadline=deadline,
        )
        group.conditioning = conditioning
        if request.shared_prefix:
            until = first_stochastic_step(request)
            first = group.samples[0]
            prefix = await self._retry(partial(self._denoise, first, inputs, until=until))
            inputs = replace(inputs, prefix=prefix)
        return inputs

    async def _run_sample(self, sample: RolloutSample, inputs: Inputs) -> None:
        num_bytes, group, binding = self._num_bytes(sample), inputs.group, inputs.binding
        await self.budget.enter(num_bytes, group.collecting.is_set)
        is_running, handed_over = True, True
        try:
            made = await self._sample_and_decode(sample, inputs)
            binding.note_begun(sample.sample_index)
            is_running = False
            self.budget.stopped()
            try:
                await binding.all_begun()
            finally:  # also when time is up: only where the version is gone, the group is made anew
                if not binding.is_gone:
                    sample.finish(*made)
                    handed_over = group.collecting.is_set()
        except Exception as error:
            if _version_gone(error) and not binding.has_begun:
                raise binding.gone() from None
            binding.note_begun(sample.sample_index)
            sample.fail(problem_of(error))
        finally:
            if is_running:
                self.budget.stopped()
            if handed_over:
                self.budget.leave(num_bytes)

    async def _sample_and_decode(
        self, sample: RolloutSample, inputs: Inputs
    ) -> tuple[ray.ObjectRef | None, ray.ObjectRef | None]:
        """Denoise, then decode; from the start again when the denoiser dies or data is lost on the way.

        Returns the refs of the trajectory and the media, None for what was not asked for.
        """
        group, decoder = inputs.group, self._handles.av_decoder
        for attempt in range(1, self._settings.max_attempts + 1):
            sample.attempt = attempt
            try:
                trajectory = await self._denoise(sample, inputs)
                sample.steps_done = group.request.num_inference_steps
                decode = partial(self._call, decoder, trajectory)
                media = await self._retry(decode) if group.request.media else None
                return trajectory if group.request.trajectory else None, media
            except Exception as error:
                if not replica_died(error) or attempt == self._settings.max_attempts:
                    raise
                if isinstance(error, ObjectLostError):
                    inputs = await self._make_inputs(group, inputs.deadline, inputs.binding)
        raise AssertionError("the last attempt returns or raises")

    async def _denoise(
        self, sample: RolloutSample, inputs: Inputs, until: int | None = None
    ) -> ray.ObjectRef:
        """One denoiser call: a sample, or the prefix of its group up to the state of step ``until``."""
        request, version = sample.request, inputs.binding.policy_version
        tag = f"{sample.attempt if until is None else 'prefix'}"
        sample_id = f"{sample.key}/{tag}" if version is None else f"{sample.key}/{tag}-v{version}"
        if until is None:
            sample.sample_id = sample_id
        order = SampleOrder(
            **self._card.stamp,
            sample_id=sample_id,
            policy_version=version,
            request=request,
            sample_index=sample.sample_index,
            until=until,
            attempt=sample.attempt,
            lease_id=self._lease_id,
            seconds_left=max(0.0, inputs.deadline - time.monotonic()),
            encode_s=inputs.encode_s,
        )
        return await self._call(
            self._handles.denoiser,
            inputs.conditioning,
            order.model_dump(mode="json"),
            inputs.prefix,
            num_rows=num_rows(request),
        )

    async def _retry(self, call: Callable[[], Awaitable[ray.ObjectRef]]) -> ray.ObjectRef:
        """A call, made again when the replica dies under it; for calls that take no attempt's number."""
        for _ in range(1, self._settings.max_attempts):
            try:
                return await call()
            except Exception as error:
                if not replica_died(error) or isinstance(error, ObjectLostError):
                    raise
        return await call()

    async def _call(self, handle: DeploymentHandle, *args: object, **kwargs: object) -> ray.ObjectRef:
        """The ref of a call's result, once it is there."""
        while True:
            try:
                return await finished_ref(handle.remote(*args, **kwargs))
            except Exception as error:
                if not self._wait_when_full or problem_of(error).code != "queue_full":
                    raise
                await asyncio.sleep(FULL_QUEUE_PAUSE_S)

    def _num_bytes(self, sample: RolloutSample) -> int:
        return sample_bytes(sample.request, self._card)

    def _fail_rest(self, group: RolloutGroup, problem: Problem) -> None:
        for sample in group.samples:
            sample.fail(problem)


def _version_gone(error: BaseException) -> bool:
    return problem_of(error).code == "policy_version_gone"


def sample_bytes(request: ResolvedRequest, card: ModelCard) -> int:
    """Bytes in the object store of one sample of the request, known from the geometry beforehand."""
    media = media_bytes(request, card) if request.media else 0
    return trajectory_bytes(request, card) + media
