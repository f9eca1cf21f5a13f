"""Deployment of the denoising stage: one sample's order in, its trajectory table out.

The engine has a thread of its own; calls only hand it samples and wait. A cancelled call drops its sample between two
steps and keeps its slot until then, so that Serve never believes the device free while it is not. Which weights it
samples from is the follower's affair. Health is the engine's heartbeat, and weights that are what was published.
"""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import pyarrow as pa
import torch
from ray.serve.handle import DeploymentHandle

from configs.settings import AppConfig
from deployments.lease_board import Progress
from deployments.metrics import DenoiserMetrics
from deployments.probe import ParityProbe
from deployments.troubles import halted
from deployments.weights.follower import Follower
from deployments.weights.source import WeightSource, source_of_this_app
from pipeline.checkpoint import load
from pipeline.conditioning import Conditioning, read
from pipeline.engine import Engine
from pipeline.entry import Finished, PolicyStamp
from pipeline.policy import Policy
from pipeline.prefix import read_prefix
from pipeline.profile import profile_of
from pipeline.record import to_table
from pipeline.sample import Job
from pipeline.troubles import stopped
from pipeline.velocity import VelocityModel
from pipeline.warm_up import check_batch_invariance, warm_up
from schemas.arrow import manifest_of
from schemas.card import ModelCard
from schemas.checks import check
from schemas.order import SampleOrder

logger = logging.getLogger("ray.serve")


class Denoiser:
    """The transformer on one device, and the engine that samples from it."""

    def __init__(
        self,
        config: AppConfig,
        card: ModelCard,
        board: DeploymentHandle,
        open_source: Callable[[AppConfig], WeightSource] = source_of_this_app,
    ) -> None:
        self._stopping = threading.Event()
        settings = config.denoiser
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self.card = card
        transformer = self._load(config)
        self.model = VelocityModel(transformer)
        self.policy = Policy(transformer)
        self.engine = Engine(
            self.model, self.card, row_buckets=settings.row_buckets, max_tokens=settings.max_tokens
        )
        self._metrics = DenoiserMetrics()
        self._probe: ParityProbe | None = None
        if settings.parity_every is not None:
            self._probe = ParityProbe(self.model, self._pack, settings.parity_every, settings.parity_alarm)
            self.engine.probe = self._probe
        self.replica_id = uuid4().hex
        self.follower = Follower(open_source(config), self.policy, self.engine, self.replica_id, self._stamp)
        self._settings = settings
        self._stall_timeout_s = settings.stall_timeout_s
        self._lease_s, self._pulse_s = config.client.lease_s, config.client.pulse_s
        self._board = board
        self._conditionings: WeakValueDictionary[str, Conditioning] = WeakValueDictionary()
        self.follower.catch_up()
        warm_up(self.model, self.card, self.engine.buckets)
        if config.batch_invariant:
            check_batch_invariance(self.model, self.card, settings.row_buckets[0])
        for target in (self.engine.run, self._pulse):
            threading.Thread(target=target, name=target.__qualname__, daemon=True).start()
        self.follower.start()

    async def __call__(
        self,
        conditioning: pa.Table,
        order: dict[str, Any],
        prefix: pa.Table | None = None,
        num_rows: int = 1,
    ) -> pa.Table:
        """Sample one trajectory. ``order`` is a SampleOrder; ``prefix`` the table of an order that ended at the
        group's first stochastic step, to go on from; ``num_rows`` is there for the router.

        Raises ValueError for an order that cannot be sampled, TimeoutError when its time is up, RuntimeError when the
        sample failed or is of another checkpoint; the text is a Problem.
        """
        if self.engine.halted and self._settings.when_halted == "refuse":
            raise halted().exception()
        sample_order = SampleOrder.model_validate(order)
        self.card.refuse_others(order)
        for given in (conditioning, prefix):
            if given is not None:
                self.card.refuse_others(manifest_of(given))
        check(sample_order.request, self.card)
        job = Job(
            sample_id=sample_order.sample_id,
            request=sample_order.request,
            sample_index=sample_order.sample_index,
            conditioning=self._on_device(conditioning),
            attempt=sample_order.attempt,
            lease_id=sample_order.lease_id,
            expires_at=time.monotonic() + sample_order.seconds_left,
            prefix=None if prefix is None else read_prefix(prefix),
            until=sample_order.until,
            policy_version=sample_order.policy_version,
            min_policy_version=sample_order.request.min_policy_version,
        )
        self.engine.extend_lease(sample_order.lease_id, self._lease_s)
        result = await self._sampled(job)
        self.follower.sampled(sample_order.sample_id, result.stamp.version)
        table = await asyncio.to_thread(self._pack, result, sample_order.encode_s)
        if (
            self.follower.fatal is not None
        ):  # looked at last: what came before it is among the samples it names
            raise stopped().exception()
        self._metrics.packed(table.nbytes)
        return table

    async def status(self) -> dict[str, Any]:
        """What this replica holds, for people and tests."""
        return {
            "replica_id": self.replica_id,
            "progress": {job.sample_id: (done, steps) for job, done, steps in self.engine.progress()},
            "stats": asdict(self.engine.stats),
            "execution_profile": profile_of(self.model.transformer).as_dict(),
            "parity": asdict(self._probe.worst) if self._probe and self._probe.worst else None,
            "weights": self.follower.state().model_dump(mode="json"),
        }

    def check_health(self) -> None:
        """Called by Serve; raises when the engine's thread has not come round for too long, and when the weights are not
        what was published."""
        if self.follower.fatal is not None:
            raise self.follower.fatal.exception()
        silent_s = time.monotonic() - self.engine.last_beat
        if silent_s > self._stall_timeout_s:
            raise RuntimeError(
                f"the engine has not finished a step for {silent_s:.0f} s (denoiser.stall_timeout_s is "
                f"{self._stall_timeout_s:.0f}); the replica is replaced"
            )

    def __del__(self) -> None:
        """Called by Serve when the replica is taken down, after its calls have drained."""
        self._stopping.set()
        for part in ("follower", "engine"):  # those that there are, of a replica that could not be made
            if part in self.__dict__:
                self.__dict__[part].stop()

    async def _sampled(self, job: Job) -> Finished:
        """The engine's result. When the call is cancelled, the job has left the engine by the time this ends."""
        handing_in = asyncio.ensure_future(asyncio.to_thread(self.engine.submit, job))
        try:
            finished = asyncio.wrap_future(await asyncio.shield(handing_in))
            return await asyncio.shield(finished)
        except asyncio.CancelledError:
            # Only what the engine holds can be cancelled there.
            await asyncio.wait([handing_in])
            self.engine.cancel(job.sample_id)
            await asyncio.wait([asyncio.wrap_future(handing_in.result())])
            raise

    def _load(self, config: AppConfig) -> Any:
        """The checkpoint's transformer, as the settings want it."""
        settings = config.denoiser
        transformer = load(
            config.model,
            "transformer",
            dtype=settings.dtype,
            device=settings.device,
            low_memory=settings.low_memory,
        )
        if settings.attention_backend is not None:
            transformer.set_attention_backend(settings.attention_backend)
        if settings.compile:
            transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
        return transformer

    def _pack(self, finished: Finished, encode_s: float = 0.0) -> pa.Table:
        profile = finished.stamp.profile
        assert profile is not None, "the stamp is this class's own"
        return to_table(
            finished,
            card=self.card,
            profile=profile,
            replica_id=self.replica_id,
            timings={"encode_s": encode_s},
        )

    def _stamp(self) -> PolicyStamp:
        """Of the weights as they are now."""
        return PolicyStamp(
            version=self.policy.version,
            digest=self.policy.digest,
            profile=profile_of(self.model.transformer),
        )

    def _on_device(self, table: pa.Table) -> Conditioning:
        """A group's conditioning is moved to the device once and kept while one of its samples needs it."""
        digest = manifest_of(table)["digest"]
        conditioning = self._conditionings.get(digest)
        if conditioning is None:
            conditioning = self._conditionings[digest] = read(table, self.model.device)
        return conditioning

    def _pulse(self) -> None:
        """Exchange progress for leases, until the replica stops. Without an answer, samples live on.

        A pulse is given up well before a lease that stood at the last one runs out. None is sent while nothing is held.
        """
        told_before = False
        while not self._stopping.wait(self._pulse_s):
            held: dict[str, Progress] = defaultdict(dict)
            progress = self.engine.progress()
            self._metrics.export(
                replace(self.engine.stats), len(progress), self.policy.version, self.follower.version_lag
            )
            if self._probe is not None:
                self._probe.export()
            for job, steps_done, num_steps in progress:
                if job.lease_id is not None:
                    held[job.lease_id][job.sample_id] = (steps_done, num_steps)
            if not held and not told_before:
                continue
            told_before = bool(held)
            try:
                pulse = self._board.pulse.remote(self.replica_id, dict(held))
                left = pulse.result(timeout_s=self._lease_s / 4)
            except Exception as error:
                logger.warning("the lease board did not answer (%s); leases are taken to stand", error)
                left = dict.fromkeys(held, self._lease_s)
            for lease_id, seconds in left.items():
                self.engine.extend_lease(lease_id, seconds)
