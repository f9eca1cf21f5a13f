"""Keeps one denoiser in line with the control record: fetches weights, changes them at a boundary, halts and resumes.

Two threads beside the engine's: one long-polls the record, so that the store hears of the replica whatever it does; the
other brings the replica into line, one record at a time. A newer record takes the place of one whose boundary has not
come yet. What cannot be put right here (an update that failed midway, weights that are not what was published) takes
the replica out: it gives its samples up, fails its health check, and its successor starts from the store.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from deployments.weights.source import Layers, WeightSource
from pipeline.boundary import Boundary
from pipeline.engine import Engine
from pipeline.entry import PolicyStamp
from pipeline.policy import Policy
from schemas.control import Control, Distrust, ReplicaState, RunState, When
from schemas.errors import Problem
from schemas.weights_check import MAX_LISTED

logger = logging.getLogger("ray.serve")

BOUNDARIES: dict[When, Boundary] = {"between_samples": "sample", "immediate": "step"}
RETRY_S = 1.0
"""Pause after the store did not answer."""
IDLE_S = 1.0
"""Longest wait for a newer record before looking whether to stop."""
GLANCE_S = 0.1
"""Between two looks for a newer record while a boundary is waited for."""
MAX_FINISHED = 10_000
"""Samples remembered until the weights that they were made with are verified."""


class _Superseded(Exception):
    """A newer record has come."""


class Follower:
    """One replica's side of the weight store."""

    def __init__(
        self,
        source: WeightSource,
        policy: Policy,
        engine: Engine,
        replica_id: str,
        stamp: Callable[[], PolicyStamp],
    ) -> None:
        self._source, self._policy, self._engine = source, policy, engine
        self._replica_id, self._stamp = replica_id, stamp
        self._control = Control()
        self._in_line = 0
        self._run: RunState = "running"
        self._checkpoint_digest = ""
        self._staged: tuple[str, Layers] | None = None
        self._problem: Problem | None = None
        self._finished: deque[str] = deque(maxlen=MAX_FINISHED)
        self._words = itertools.count(1)
        self._news = threading.Condition()
        self._stopping = False
        self.fatal: Problem | None = None
        """Why this replica must go; None while it may stay."""

    # From the replica

    def catch_up(self, checkpoint_digest: str) -> None:
        """Get the policy in place before the replica reports ready. Raises what keeps it from that."""
        self._checkpoint_digest = checkpoint_digest
        self._control = self._source.register(checkpoint_digest, self._policy.spec)
        self._apply(self._fetch(self._control.version))
        self._verify()
        if self.fatal is not None:
            raise self.fatal.exception()
        if self._control.run != "running":
            self._engine.halt()
            self._run = "paused"

    def start(self) -> None:
        """Follow the record from now on, beside the engine's thread."""
        for target in (self._listen, self._act):
            threading.Thread(target=target, name=target.__qualname__, daemon=True).start()

    def stop(self) -> None:
        """Follow it no longer."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
        self._source.leave(self._replica_id)

    def sampled(self, sample_id: str) -> None:
        """A sample was finished; it is named if its weights turn out wrong."""
        self._finished.append(sample_id)

    @property
    def version_lag(self) -> int:
        """How many versions this replica is behind the policy."""
        return self._control.version - self._policy.version

    def state(self) -> ReplicaState:
        """As the store and people hear it."""
        word = next(self._words)  # before anything is looked at: a higher one is never older
        problem = self.fatal or self._problem
        return ReplicaState(
            replica_id=self._replica_id,
            word=word,
            version=self._policy.version,
            weights_digest=self._policy.digest,
            run=self._run,
            revision=self._in_line,
            staged=self._staged[0] if self._staged else None,
            problem=problem.payload() if problem else None,
        )

    # The listening thread

    def _listen(self) -> None:
        while not self._stopping:
            try:
                record = self._source.watch(self.state(), self._control.revision)
                if record.wants_spec:
                    record = self._source.register(self._checkpoint_digest, self._policy.spec)
            except Exception as error:
                logger.warning("the weight store did not answer (%s); the policy stays as it is", error)
                time.sleep(RETRY_S)
                continue
            with self._news:
                self._control = record
                self._news.notify_all()

    # The acting thread

    def _act(self) -> None:
        while not self._stopping and self.fatal is None:
            with self._news:
                if self._control.revision == self._in_line:
                    self._news.wait(IDLE_S)
                    continue
                record = self._control
            try:
                self._problem = None
                self._bring_into_line(record)
            except _Superseded:
                continue
            except Exception as error:
                known = Problem.of(error)
                logger.exception("revision %d could not be followed", record.revision)
                self._problem = known or Problem(
                    code="internal", rule=f"{type(error).__name__}: {error}", remedy="see the replica's log"
                )
                if record.version > self._policy.version:
                    # Weights that could not be had this time may be had the next.
                    self._report()
                    time.sleep(RETRY_S)
                    continue
            self._in_line = record.revision
            self._report()
        if self.fatal is not None:
            self._report()

    def _bring_into_line(self, record: Control) -> None:
        boundary = BOUNDARIES[record.when]
        wanted = record.staged.identity if record.staged else record.identity
        if self._staged is not None and self._staged[0] not in (wanted, record.identity):
            self._staged = None
        if record.staged is not None:
            self._stage(record.staged.version, wanted)
        if record.run == "asleep" and self._run == "asleep":
            # Applied when the weights are back on the device: merging elsewhere would give other bits.
            if record.version > self._policy.version:
                self._stage(record.version, record.identity)
            return
        if self._run == "asleep":
            self._cross("step", self._policy.to_device, record)
            self._run = "paused"
        swap = self._begin_swap(record) if record.version > self._policy.version else None
        if record.run == "running" and self._run == "paused":
            # After the swap is in the queue: no sample starts on the version before.
            self._engine.resume()
            self._run = "running"
        if swap is not None:
            self._wait(swap, record)
            self._report()
            self._verify()
        if record.run != "running" and self._run == "running":
            self._cross(boundary, self._engine.halt, record)
            self._run = "paused"
        if record.run == "asleep" and self._run == "paused":
            self._cross("step", self._policy.to_host, record)
            self._run = "asleep"

    def _stage(self, version: int, identity: str) -> None:
        """Fetch a version and compare it with the model, while sampling goes on."""
        if self._staged is not None and self._staged[0] == identity:
            return
        self._staged = None
        layers = self._fetch(version)
        publication, tensors = layers[-1]
        if publication.identity != identity:
            raise RuntimeError(f"version {version} has been published anew meanwhile")
        self._policy.check(publication, tensors)
        self._staged = (identity, layers)

    def _begin_swap(self, record: Control) -> Future[None]:
        is_staged = self._staged is not None and self._staged[0] == record.identity
        layers = self._staged[1] if self._staged and is_staged else self._fetch(record.version)
        return self._engine.at_boundary(BOUNDARIES[record.when], lambda: self._apply(layers))

    def _apply(self, layers: Layers) -> None:
        """Write a version into the model, on the engine's thread or before it runs."""
        try:
            for index, (publication, tensors) in enumerate(layers):
                self._policy.apply(publication, tensors)
                if index < len(layers) - 1:
                    self._verify()
            self._finished.clear()
        except Exception as error:
            if not self._policy.is_intact:
                self._take_out(error)
            raise
        finally:
            self._engine.stamp = self._stamp()
            self._staged = None

    def _verify(self) -> None:
        """Read back what was written and compare it with what was published, while sampling goes on."""
        differ = self._policy.verify()
        if not differ:
            return
        self._take_out(RuntimeError(f"{len(differ)} tensors are not what was published, such as {differ[0]}"))
        found = Distrust(
            replica_id=self._replica_id,
            version=self._policy.version,
            tensors=tuple(differ[:MAX_LISTED]),
            sample_ids=tuple(self._finished),
        )
        while not self._stopping:
            try:
                return self._source.distrust(found)
            except Exception as error:
                logger.warning("the weight store did not hear of wrong weights (%s); trying again", error)
                time.sleep(RETRY_S)

    def _take_out(self, error: Exception) -> None:
        self.fatal = Problem(
            code="internal",
            field="weights",
            rule=f"the replica's weights are not those of a version ({error}), so it is replaced",
            remedy="see the replica's log",
        )
        logger.error("%s", self.fatal)
        self._engine.stop()

    def _cross(self, boundary: Boundary, work: Callable[[], None], record: Control) -> None:
        self._wait(self._engine.at_boundary(boundary, work), record)

    def _wait(self, crossing: Future[None], record: Control) -> None:
        """Until the boundary has come, or a newer record: then the work is taken back, unless it has begun."""
        while True:
            try:
                return crossing.result(GLANCE_S)
            except FutureTimeoutError:
                if crossing.done():
                    return crossing.result(0)
            if (self._control.revision != record.revision or self._stopping) and crossing.cancel():
                raise _Superseded

    def _fetch(self, version: int) -> Layers:
        """The layers that are newer than what the model has, without copies."""
        return self._source.layers(self._policy.version, version)

    def _report(self) -> None:
        try:
            self._source.report(self.state())
        except Exception as error:
            logger.warning("the weight store did not take a report (%s); it comes with the next look", error)
