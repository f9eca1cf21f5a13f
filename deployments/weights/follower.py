"""Keeps one denoiser in line with the control record: fetches weights, changes them at a boundary, halts and resumes.

Two threads beside the engine's: one long-polls the record, so that the store hears of the replica whatever it does; the
other brings the replica into line, one record at a time: it halts, takes the version on, goes on, and fetches what is to
come. A part that fails does not hold up the others, and is tried again. A newer record takes the place of one whose
boundary has not come yet. What cannot be put right here (an update that failed midway, weights that are not what was
published) takes the replica out: it gives its samples up, fails its health check, and its successor starts from the
store.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from deployments.calls import problem_of
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
        self._has_failed = False
        self._staged: dict[str, Layers] = {}
        self._problem: Problem | None = None
        self._finished: deque[tuple[int, str]] = deque(maxlen=MAX_FINISHED)
        self._words = itertools.count(1)
        self._news = threading.Condition()
        self._stopping = False
        self.fatal: Problem | None = None
        """Why this replica must go; None while it may stay."""

    # From the replica

    def catch_up(self) -> None:
        """Get the policy in place before the replica reports ready. Raises what keeps it from that."""
        self._control = self._register()
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

    def sampled(self, sample_id: str, version: int) -> None:
        """A sample was finished with that version; it is named if the weights turn out wrong. To be told before the
        sample goes out, and ``fatal`` to be looked at after: one of the two knows of every wrong sample."""
        self._finished.append((version, sample_id))

    @property
    def version_lag(self) -> int:
        """How many versions this replica is behind the policy."""
        return self._control.version - self._policy.version

    def state(self) -> ReplicaState:
        """As the store and people hear it."""
        word = next(self._words)  # before anything is looked at: a higher one is never older
        revision = self._in_line  # likewise: what it says was so when that was tried
        problem = self.fatal or self._problem
        return ReplicaState(
            replica_id=self._replica_id,
            base_digest=self._policy.base_digest,
            word=word,
            version=self._policy.version,
            weights_digest=self._policy.digest,
            run=self._run,
            revision=revision,
            staged=tuple(self._staged),
            problem=problem.payload() if problem else None,
        )

    # The listening thread

    def _listen(self) -> None:
        while not self._stopping:
            try:
                record = self._source.watch(self.state(), self._control.revision)
                record = self._register() if record.wants_spec else self._of_mine(record)
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
                    self._news.wait(RETRY_S if self._has_failed else IDLE_S)
                if self._control.revision == self._in_line and not self._has_failed:
                    continue
                record = self._control
            try:
                problem = self._bring_into_line(record)
            except _Superseded:
                continue
            self._problem = problem
            is_behind = record.version > self._policy.version or record.run != self._run
            self._has_failed = problem is not None and is_behind
            self._in_line = record.revision
            self._report()
        if self.fatal is not None:
            self._report()

    def _bring_into_line(self, record: Control) -> Problem | None:
        """Part by part; returns the first that went wrong."""
        wanted = (record.identity, record.staged.identity if record.staged else "")
        self._staged = {identity: layers for identity, layers in self._staged.items() if identity in wanted}
        problem: Problem | None = None
        for part in (self._halt, self._change, self._fetch_next):
            try:
                part(record)
            except _Superseded:
                raise
            except Exception as error:
                logger.exception("revision %d could not be followed", record.revision)
                problem = problem or problem_of(error)
        return problem

    def _halt(self, record: Control) -> None:
        """Stand still, where the record says so: before anything else is begun."""
        if record.run == "running":
            return
        if self._run == "running":
            self._cross(BOUNDARIES[record.run_when], self._engine.halt, record)
            self._run = "paused"
        if record.run == "asleep" and self._run == "paused":
            self._cross("step", self._policy.to_host, record)
            self._run = "asleep"

    def _change(self, record: Control) -> None:
        """Wake, take the version on and resume, as far as the record says so."""
        if record.run != "asleep" and self._run == "asleep":
            self._cross("step", self._policy.to_device, record)
            self._run = "paused"
        is_halted, boundary = record.run != "running", BOUNDARIES[record.swap_when]
        resumes = not is_halted and self._run == "paused"
        if record.version > self._policy.version:
            if is_halted and not self._may_swap(boundary):
                return self._stage(record.version, record.identity)
            layers = self._staged.get(record.identity) or self._fetch(record.version)
            # Where samples were halted they end on their version, and none begins on it.
            swap = self._engine.at_boundary(
                "step" if is_halted else boundary, lambda: self._apply(layers), admitting=not resumes
            )
        else:
            swap = None
        if resumes:
            # After the swap is in the queue: no sample starts on the version before.
            self._engine.resume()
            self._run = "running"
        if swap is not None:
            self._wait(swap, record)
            self._report()
            self._verify()

    def _may_swap(self, boundary: Boundary) -> bool:
        """Whether weights may change while the replica stands still. In sleep they may not: merging on the host would
        give other bits."""
        return self._run != "asleep" and (boundary == "step" or self._engine.is_drained)

    def _fetch_next(self, record: Control) -> None:
        if record.staged is not None:
            self._stage(record.staged.version, record.staged.identity)

    def _stage(self, version: int, identity: str) -> None:
        """Fetch a version and compare it with the model, while sampling goes on."""
        if identity in self._staged:
            return
        layers = self._fetch(version)
        publication, tensors = layers[-1]
        if publication.identity != identity:
            raise RuntimeError(f"version {version} has been published anew meanwhile")
        self._policy.check(publication, tensors)
        self._staged = {**self._staged, identity: layers}

    def _apply(self, layers: Layers) -> None:
        """Write a version into the model, on the engine's thread or before it runs."""
        try:
            newer = [layer for layer in layers if layer[0].version > self._policy.version]
            for index, (publication, tensors) in enumerate(newer):
                self._policy.apply(publication, tensors)
                if index < len(newer) - 1:
                    self._verify()
        except Exception as error:
            if not self._policy.is_intact:
                self._take_out(error)
            raise
        finally:
            self._engine.stamp = self._stamp()
            self._staged = {}  # what was fetched for a version after this one is fetched again

    def _verify(self) -> None:
        """Read back what was written and compare it with what was published, while sampling goes on."""
        differ = self._policy.verify()
        if not differ:
            return
        wrong_version = self._policy.version
        self._take_out(RuntimeError(f"{len(differ)} tensors are not what was published, such as {differ[0]}"))
        found = Distrust(
            replica_id=self._replica_id,
            version=wrong_version,
            tensors=tuple(differ[:MAX_LISTED]),
            sample_ids=tuple(name for version, name in list(self._finished) if version == wrong_version),
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

    def _register(self) -> Control:
        return self._of_mine(self._source.register(self.state(), self._policy.spec))

    def _of_mine(self, record: Control) -> Control:
        """What of the record concerns this replica: of another checkpoint's policy, for whose replicas it is about to
        make room, whether to halt and nothing more."""
        if record.base_digest == self._policy.base_digest:
            return record
        return record.model_copy(
            update={"version": self._policy.version, "identity": "", "staged": None, "wants_spec": False}
        )

    def _fetch(self, version: int) -> Layers:
        """The layers that are newer than what the model has, without copies."""
        return self._source.layers(self._policy.version, version)

    def _report(self) -> None:
        try:
            self._source.report(self.state())
        except Exception as error:
            logger.warning("the weight store did not take a report (%s); it comes with the next look", error)
