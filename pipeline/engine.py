"""The step loop: one thread, one model, and the samples it moves through it together.

    tick:  drop the cancelled and the expired
           do what waits for this boundary (other weights, a halt)
           admit the waiting
           choose a batch of one geometry and one plan, oldest first
           forward once (rows may be at different steps)
           guide and move every sample, emit the finished

It knows no Ray and no request schema beyond what a sample needs. Other threads reach it through ``submit``, ``cancel``,
``extend_lease`` and ``at_boundary``, which take effect between ticks; a result comes back through the future that was
returned. A sample that fails, fails alone: the loop and its neighbours go on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from pipeline.batching import Buckets, admit, choose
from pipeline.boundary import Boundaries, Boundary
from pipeline.entry import Entry, Finished, PolicyStamp
from pipeline.passes import velocities_of
from pipeline.sample import Job, Sample
from pipeline.side_work import Draws, HostCopies, Pace
from pipeline.stats import EngineStats
from pipeline.troubles import expired, failure, lease_ran_out, non_finite, stopped, version_gone
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.errors import Problem

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05
"""Longest sleep between two looks at leases and deadlines when there is nothing to do."""


class Engine:
    """Samples rollouts from one model replica. ``run`` is its thread; ``tick`` is one turn of it."""

    def __init__(
        self,
        model: VelocityModel,
        card: ModelCard,
        *,
        row_buckets: Sequence[int],
        max_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.card = model, card
        self.buckets = Buckets(sizes=tuple(row_buckets), max_tokens=max_tokens)
        self.stats = EngineStats()
        self.stamp = PolicyStamp()
        """Set by whoever changes the model's weights, at a boundary."""
        self.last_beat = clock()
        self.probe: Callable[[Finished], None] | None = None
        """Called on the engine's thread with each finished sample, under the weights that made it."""
        self._boundaries = Boundaries()
        self._submitted = 0
        self._news = False
        self._copies, self._pace = HostCopies(model.device), Pace(model.device)
        self._drawing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="noise")
        self._clock = clock
        self._waiting: deque[Entry] = deque()
        self._active: list[Entry] = []
        self._cancelled: set[str] = set()
        self._leases: dict[str, float] = {}
        self._wake = threading.Condition()
        self._stopping = False

    # From other threads

    def submit(self, job: Job) -> Future[Finished]:
        """Queue a job; its future gets a Finished, or a builtin exception whose text is a Problem.

        Cancelling the future drops the sample, as ``cancel`` does.
        The initial noise is drawn here, on the caller's thread.
        """
        try:
            sample = Sample(job, self.card, self._copies, Draws(self._drawing))
        except RuntimeError:
            if self._stopping:  # nobody draws any more
                raise stopped().exception() from None
            raise
        with self._tell():
            if self._stopping:
                raise stopped().exception()
            entry = Entry(job, sample, self._clock(), self._submitted)
            self._submitted += 1
            self._waiting.append(entry)
        return entry.future

    def cancel(self, sample_id: str) -> None:
        """Drop a sample between two steps; its future is then cancelled. Unknown ids are ignored."""
        with self._tell():
            self._cancelled.add(sample_id)

    def extend_lease(self, lease_id: str, seconds: float) -> None:
        """Let samples of this lease live for ``seconds`` more from now; 0 or less drops them at the next tick."""
        with self._tell():
            self._leases[lease_id] = self._clock() + seconds

    def at_boundary(
        self, boundary: Boundary, work: Callable[[], None], *, admitting: bool = True
    ) -> Future[None]:
        """Have ``work`` done on the engine's thread at the next boundary; the future gets None, or what it raised.

        Until a "sample" boundary comes, only samples start that were submitted before this call and are bound to the
        version that is sampled from; none at all unless ``admitting``. The others wait.
        """
        with self._tell():
            return self._boundaries.at(boundary, work, self._submitted if admitting else 0)

    def halt(self) -> None:
        """Let no sample move until ``resume``. Meant as work ``at_boundary``."""
        self._boundaries.halt()

    def resume(self) -> None:
        """Let samples move again."""
        with self._tell():
            self._boundaries.resume()

    @property
    def halted(self) -> bool:
        return self._boundaries.halted

    @property
    def is_drained(self) -> bool:
        """Whether no sample is under way."""
        with self._wake:
            return not self._active

    def progress(self) -> list[tuple[Job, int, int]]:
        """Every sample held here, with its steps done, 0 before it has begun, and its steps in all."""
        with self._wake:
            held = [*self._active, *self._waiting]
        return [(e.job, e.sample.step if e.started_at is not None else 0, e.sample.num_steps) for e in held]

    def stop(self) -> None:
        """End ``run`` after the current tick; samples still held fail."""
        with self._tell():
            self._stopping = True

    # On the engine's thread

    def run(self) -> None:
        """Tick until ``stop``. Never raises: a tick that fails as a whole fails the samples it held."""
        while not self._stopping:
            self.last_beat = self._clock()
            try:
                worked = self.tick()
            except Exception:
                logger.exception("a tick failed; its samples are given up and the loop goes on")
                self._give_up_all(
                    Problem(
                        code="internal",
                        rule="the denoiser failed between steps",
                        remedy="see the replica's log",
                    )
                )
                worked = True
            with self._wake:
                if not worked and not self._news:
                    self._wake.wait(IDLE_WAIT_S)
                self._news = False
        self._give_up_all(stopped())
        self._boundaries.give_up(stopped().exception())
        self._drawing.shutdown(wait=False)

    def tick(self) -> bool:
        """One turn of the loop; False when there was nothing to step."""
        self._drop()
        if self._cross():
            self._drop()
        if self.halted:
            return False
        self._admit()
        batch = choose(self._active, self.buckets)
        if batch:
            started = self._clock()
            self._step(batch)
            self._pace.step()
            self._emit()
            self.stats.ticks += 1
            self.stats.busy_s += self._clock() - started
        return bool(batch)

    @torch.inference_mode()
    def _step(self, batch: Sequence[Entry]) -> None:
        """Move every sample of the batch by one step. When the shared pass fails, each is tried alone."""
        try:
            moves = velocities_of([entry.sample for entry in batch], self.model, self.buckets, self.stats)
        except Exception as error:
            if len(batch) == 1:
                self._fail(batch[0], error)
                return
            logger.warning("a forward pass of %d samples failed (%s); trying each alone", len(batch), error)
            moves = None
        if moves is None:  # outside the handler, whose traceback keeps the failed pass's tensors alive
            for entry in batch:
                self._step([entry])
            return
        for entry, (velocities, places) in zip(batch, moves, strict=True):
            try:
                entry.sample.advance(velocities, places, self.stamp.version)
            except Exception as error:
                self._fail(entry, error)

    def _cross(self) -> bool:
        started, drained = self._clock(), not self._active and not self._startable()
        crossed = self._boundaries.cross(drained=drained)
        if crossed:
            self.stats.swaps += crossed
            self.stats.swap_s += self._clock() - started
        return bool(crossed)

    def _admit(self) -> None:
        with self._wake:
            for entry in admit(self._active, self._startable(), self.buckets):
                self._waiting.remove(entry)
                self._active.append(entry)
                entry.started_at = self._clock()

    def _startable(self) -> list[Entry]:
        """The waiting samples that may start on the present weights, in order."""
        before = self._boundaries.admitted_before
        with self._wake:
            if before is None:
                return [entry for entry in self._waiting if entry.may_start_on(self.stamp.version)]
            return [e for e in self._waiting if e.number < before and e.is_bound_to(self.stamp.version)]

    def _emit(self) -> None:
        done = [entry for entry in self._active if entry.sample.done]
        for entry in done:
            sample, now = entry.sample, self._clock()
            assert entry.started_at is not None
            problem = non_finite(sample)
            if problem is not None:
                self._fail(entry, problem.exception())
                continue
            finished = Finished(
                sample=sample,
                stamp=self.stamp,
                wait_s=entry.started_at - entry.submitted_at,
                denoise_s=now - entry.started_at,
            )
            self.stats.done += 1
            self.stats.wait_s += finished.wait_s
            if self.probe is not None:
                self.probe(finished)
            if self._let_go(entry):
                entry.future.set_result(finished)

    def _drop(self) -> None:
        """Let go of samples that were cancelled, whose deadline has passed, whose lease has run out, or that did not
        start before their version was replaced."""
        now = self._clock()
        with self._wake:
            cancelled, self._cancelled = self._cancelled, set()
            held = [*self._active, *self._waiting]
            kept = {entry.job.lease_id for entry in held}
            self._leases = {lease: until for lease, until in self._leases.items() if lease in kept}
            leases = dict(self._leases)
        for entry in held:
            job = entry.job
            if job.sample_id in cancelled or entry.future.cancelled():
                self.stats.cancelled += 1
                entry.future.cancel()
                self._let_go(entry)
            elif now > job.expires_at:
                self._fail(entry, expired(entry.sample).exception())
            elif job.lease_id is not None and now > leases.get(job.lease_id, now):
                self._fail(entry, lease_ran_out(job).exception())
            elif (
                entry.started_at is None
                and (job.policy_version or 0) < self.stamp.version
                and job.policy_version is not None
            ):
                self._fail(entry, version_gone(job, self.stamp.version).exception())

    def _fail(self, entry: Entry, error: Exception) -> None:
        problem = Problem.of(error) or failure(entry.sample, error)
        if problem.code in ("deadline_exceeded", "lease_expired"):
            self.stats.expired += 1
        else:
            self.stats.failed += 1
        if self._let_go(entry):
            entry.future.set_exception(problem.exception())

    def _let_go(self, entry: Entry) -> bool:
        """Hold the sample no longer; whether its future still wants an outcome, which it does until it is cancelled."""
        with self._wake:
            if entry in self._active:
                self._active.remove(entry)
            else:
                self._waiting.remove(entry)
        return entry.future.set_running_or_notify_cancel()

    @contextmanager
    def _tell(self) -> Iterator[None]:
        """Change what the loop reads, and wake it."""
        with self._wake:
            yield
            self._news = True
            self._wake.notify()

    def _give_up_all(self, problem: Problem) -> None:
        with self._wake:
            held = [*self._active, *self._waiting]
        for entry in held:
            self._fail(entry, problem.exception())
