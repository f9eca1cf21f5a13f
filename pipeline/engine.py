"""The step loop: one thread, one model, and the samples it moves through it together.

    tick:  drop the cancelled and the expired, admit the waiting
           choose a batch of one geometry and one plan, oldest first
           forward once (rows may be at different steps)
           guide and move every sample, emit the finished

It knows no Ray and no request schema beyond what a sample needs. Other threads reach it through ``submit``, ``cancel``
and ``extend_lease``, which take effect between ticks; a result comes back through the future that ``submit`` returned.
A sample that fails, fails alone: the loop and its neighbours go on.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from pipeline.batching import Buckets, admit, choose
from pipeline.guidance import Velocities
from pipeline.noise import MODALITIES, Modality
from pipeline.sample import Job, Places, Sample
from pipeline.side_work import Draws, HostCopies, Pace
from pipeline.stats import EngineStats
from pipeline.troubles import expired, failure, lease_ran_out, non_finite, stopped
from pipeline.velocity import PLAIN, Perturbation, Place, Row, VelocityModel
from schemas.card import ModelCard
from schemas.errors import Problem
from schemas.geometry import Geometry

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05
"""Longest sleep between two looks at leases and deadlines when there is nothing to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A sample at its last step, with what was measured on the way."""

    sample: Sample
    wait_s: float
    """From submission to the first step."""
    denoise_s: float
    """From the first step to the last, shared forward passes counted whole."""


class Entry:
    """A job in the engine, from submission to its result."""

    def __init__(self, job: Job, sample: Sample, submitted_at: float) -> None:
        self.job, self.sample = job, sample
        self.future: Future[Finished] = Future()
        self.submitted_at = submitted_at
        self.started_at: float | None = None
        self.batch_key = (sample.geometry, sample.plan, job.conditioning.masked)
        self.num_rows = sample.plan.num_rows
        self.num_tokens = sample.geometry.num_video_tokens + sample.geometry.audio_frames


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
        self.last_beat = clock()
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
        sample = Sample(job, self.card, self._copies, Draws(self._drawing))
        entry = Entry(job, sample, self._clock())
        with self._wake:
            if self._stopping:
                raise stopped().exception()
            self._waiting.append(entry)
            self._wake.notify()
        return entry.future

    def cancel(self, sample_id: str) -> None:
        """Drop a sample between two steps; its future is then cancelled. Unknown ids are ignored."""
        with self._wake:
            self._cancelled.add(sample_id)
            self._wake.notify()

    def extend_lease(self, lease_id: str, seconds: float) -> None:
        """Let samples of this lease live for ``seconds`` more from now; 0 or less drops them at the next tick."""
        with self._wake:
            self._leases[lease_id] = self._clock() + seconds
            self._wake.notify()

    def progress(self) -> list[tuple[Job, int, int]]:
        """Every sample held here, with its steps done and its steps in all."""
        with self._wake:
            return [(e.job, e.sample.step, e.sample.num_steps) for e in [*self._active, *self._waiting]]

    def stop(self) -> None:
        """End ``run`` after the current tick; samples still held fail."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

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
            if not worked:
                with self._wake:
                    if not self._waiting and not self._cancelled and not self._stopping:
                        self._wake.wait(IDLE_WAIT_S)
        self._give_up_all(stopped())
        self._drawing.shutdown(wait=False)

    def tick(self) -> bool:
        """One turn of the loop; False when there was nothing to step."""
        self._drop()
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
            moves = self._forward([entry.sample for entry in batch])
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
                entry.sample.advance(velocities, places)
            except Exception as error:
                self._fail(entry, error)

    def _forward(self, samples: Sequence[Sample]) -> list[tuple[dict[Modality, Velocities], Places]]:
        """All passes of the samples' common plan: each sample's velocities, and where its rows stood."""
        plan, of = samples[0].plan, samples[0].geometry
        positive = [sample.positive_row() for sample in samples]
        negative = [sample.negative_row() for sample in samples] if plan.negative else []
        # Negative rows first, as diffusers stacks them.
        main, places = self._pass([*negative, *positive], of)
        perturbed = [self._pass(positive, of, perturbation)[0] for perturbation in plan.perturbations]
        first = len(negative)
        return [
            (
                {
                    modality: Velocities(
                        positive=main[modality][first + i],
                        negative=main[modality][i] if negative else None,
                        perturbed=tuple(velocities[modality][i] for velocities in perturbed),
                    )
                    for modality in MODALITIES
                },
                Places(positive=places[first + i], negative=places[i] if negative else None),
            )
            for i in range(len(samples))
        ]

    def _pass(
        self, rows: Sequence[Row], of: Geometry, perturbation: Perturbation = PLAIN
    ) -> tuple[dict[Modality, list[torch.Tensor]], list[Place]]:
        """Velocities [1, L, C] of every row, in batches of the buckets' sizes, padded by repeating a row."""
        velocities: dict[Modality, list[torch.Tensor]] = {modality: [] for modality in MODALITIES}
        places: list[Place] = []
        rest = list(rows)
        num_tokens = of.num_video_tokens + of.audio_frames
        for num_rows in self.buckets.split(len(rows), num_tokens):
            own, rest = rest[:num_rows], rest[num_rows:]
            started = self._clock()
            result = self.model([*own, *[own[0]] * (num_rows - len(own))], of, perturbation)
            self.stats.forward_s += self._clock() - started
            self.stats.rows += len(own)
            self.stats.padded_rows += num_rows - len(own)
            self.stats.tokens += len(own) * num_tokens
            for index in range(len(own)):
                places.append(Place(num_rows=num_rows, index=index))
                for modality in MODALITIES:
                    velocities[modality].append(result[modality][index : index + 1])
        return velocities, places

    def _admit(self) -> None:
        with self._wake:
            admitted = admit(self._active, self._waiting, self.buckets)
            for entry in admitted:
                self._waiting.popleft()
                self._active.append(entry)
                entry.started_at = self._clock()

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
                wait_s=entry.started_at - entry.submitted_at,
                denoise_s=now - entry.started_at,
            )
            self.stats.done += 1
            self.stats.wait_s += finished.wait_s
            if self._let_go(entry):
                entry.future.set_result(finished)

    def _drop(self) -> None:
        """Let go of samples that were cancelled, whose deadline has passed or whose lease has run out."""
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

    def _give_up_all(self, problem: Problem) -> None:
        with self._wake:
            held = [*self._active, *self._waiting]
        for entry in held:
            self._fail(entry, problem.exception())
