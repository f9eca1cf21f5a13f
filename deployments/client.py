"""RolloutClient: how a trainer gets rollouts. It runs the graph itself and so owns all that it gets.

    client = RolloutClient.connect()
    groups = [client.submit({"prompt": prompt, "num_samples": 8}) for prompt in prompts]
    for sample in client.as_completed(groups):
        table = ray.get(sample.trajectory)

`submit` returns at once. One background thread with an event loop chains the calls, retries, renews the lease and keeps
the bytes in flight within bounds. Made in the trainer's own process or actor; results die with that process.
"""

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from concurrent.futures import as_completed as futures_as_completed
from contextlib import nullcontext
from typing import Any, Self, TypeVar
from uuid import uuid4

import ray
from ray import serve

from configs.settings import ClientSettings
from deployments.conductor import Conductor, sample_bytes
from deployments.group import RolloutGroup, RolloutSample
from deployments.handles import Handles
from deployments.progress import progress_bar
from deployments.weights.controls import WeightControls
from schemas.card import ModelCard
from schemas.errors import invalid
from schemas.request import RolloutRequest
from schemas.resolve import resolve

logger = logging.getLogger(__name__)

CONNECT_DEADLINE_S = 60.0
CLOSE_DEADLINE_S = 10.0

T = TypeVar("T")


class RolloutClient(WeightControls):
    """Submits groups to a running app. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        handles: Handles,
        card: ModelCard,
        settings: ClientSettings,
        *,
        wait_when_full: bool = True,
    ) -> None:
        self.card = card
        """What is served: ratios, limits and defaults."""
        self.lease_id = uuid4().hex
        super().__init__(handles.app_name)
        self._settings = settings
        self._board = handles.lease_board
        self._conductor = Conductor(
            handles, card, settings, self.lease_id, lambda: self.weight_store, wait_when_full=wait_when_full
        )
        self._tasks: dict[RolloutGroup, asyncio.Task[None]] = {}
        self._is_on_ray = ray.is_initialized()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()
        self._renewal = asyncio.run_coroutine_threadsafe(self._renew(), self._loop)

    @classmethod
    def connect(cls, app_name: str = "default", *, max_bytes_in_flight: int | None = None) -> Self:
        """A client of the app that runs under ``app_name`` on the Ray cluster that this process is connected to.

        ``max_bytes_in_flight`` replaces the app's own bound on bytes. Raises TimeoutError when the app does not answer.
        """
        description = serve.get_app_handle(app_name).describe.remote()
        answer = description.result(timeout_s=CONNECT_DEADLINE_S, _skip_asyncio_check=True)
        settings = ClientSettings.model_validate(answer["client"])
        if max_bytes_in_flight is not None:
            settings = settings.model_copy(update={"max_bytes_in_flight": max_bytes_in_flight})
        return cls(Handles.of_app(app_name), ModelCard.model_validate(answer["card"]), settings)

    def submit(self, request: RolloutRequest | Mapping[str, Any]) -> RolloutGroup:
        """Start a group and return it at once; its samples fill in as they are done.

        Raises ValueError (a Problem: field, value, rule, remedy) for a request that cannot be sampled, before anything
        is sent.
        """
        group = RolloutGroup(resolve(request, self.card), self._cancel)
        needed = sample_bytes(group.request, self.card)
        if needed > self._settings.max_bytes_in_flight:
            raise invalid(
                "return_steps",
                f"{needed} bytes a sample",
                f"a sample fits in the client's max_bytes_in_flight of {self._settings.max_bytes_in_flight}",
                "raise client.max_bytes_in_flight, keep fewer states, or leave media out",
            ).exception()
        if self._loop.is_closed():
            raise RuntimeError("the client is closed and takes no further requests; make another")
        # In a context of its own: inside a replica, Serve would take the group's calls for parts of the request that is
        # being answered there, and give them all its id.
        self._loop.call_soon_threadsafe(self._start, group, context=contextvars.Context())
        return group

    def gather(
        self, groups: Iterable[RolloutGroup], *, timeout_s: float | None = None, progress: bool = False
    ) -> list[RolloutGroup]:
        """Wait until every sample of ``groups`` is done or has failed, and return the groups.

        Failures are values: look at ``group.problems`` or call ``group.raise_if_failed()``. Every sample ends by its
        request's deadline. Raises TimeoutError after ``timeout_s``; the groups then run on.
        """
        waited = list(groups)
        self.collect(waited)
        with progress_bar(waited) if progress else nullcontext():
            _, unsettled = wait([group.settled for group in waited], timeout=timeout_s)
        if unsettled:
            raise TimeoutError(
                f"{len(unsettled)} of {len(waited)} groups were not done after {timeout_s} s; they run on"
            )
        return waited

    def as_completed(
        self, groups: Iterable[RolloutGroup], *, timeout_s: float | None = None, progress: bool = False
    ) -> Iterator[RolloutSample]:
        """The samples of ``groups`` in the order in which they are done or fail.

        Raises TimeoutError when the next one is not there ``timeout_s`` after the first wait.
        """
        waited = list(groups)
        self.collect(waited)
        samples = {sample.settled: sample for group in waited for sample in group.samples}
        with progress_bar(waited) if progress else nullcontext():
            for settled in futures_as_completed(samples, timeout=timeout_s):
                yield samples[settled]

    def collect(self, groups: Iterable[RolloutGroup]) -> None:
        """Say that somebody waits for these groups: their samples count as handed over as soon as they are done."""

        for group in groups:
            self._soon(self._hand_over, group)

    def close(self) -> None:
        """Cancel what is not done, give the lease up and end the background thread. Refs already held stay good."""
        if not self._thread.is_alive():
            return
        try:
            self._await(self._shut_down(), CLOSE_DEADLINE_S)
        except Exception as error:
            logger.warning("closing the client: %s; the lease ends by itself", error)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_DEADLINE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # On the background loop

    def _start(self, group: RolloutGroup) -> None:
        task = self._loop.create_task(self._conductor.run(group))
        self._tasks[group] = task
        task.add_done_callback(lambda _: self._tasks.pop(group, None))

    def _cancel(self, group: RolloutGroup) -> None:
        def cancel() -> None:
            self._hand_over(group)
            task = self._tasks.get(group)
            if task is not None:
                # In the next turn: a task that is cancelled before its first step never runs, and settles nothing.
                self._loop.call_soon(task.cancel)

        self._soon(cancel)

    def _hand_over(self, group: RolloutGroup) -> None:
        """From now on the group's samples do not count as waiting to be collected."""
        if group.collecting.is_set():
            return
        group.collecting.set()
        for sample in group.samples:
            self._conductor.handed_over(sample)
        self._conductor.budget.review()

    async def _renew(self) -> None:
        """Keep the lease and learn the samples' progress, until the client is closed or the process leaves Ray: a call
        would start a cluster then."""
        while ray.is_initialized() == self._is_on_ray:
            try:
                async with asyncio.timeout(self._settings.lease_s / 4):
                    progress = await self._board.renew.remote(self.lease_id)
                self._note(progress)
            except Exception as error:
                logger.warning("the lease was not renewed (%r); trying again", error)
            await asyncio.sleep(self._settings.pulse_s)

    def _note(self, progress: Mapping[str, tuple[int, int]]) -> None:
        for group in self._tasks:
            for sample in group.samples:
                steps_done, _ = progress.get(sample.sample_id, (0, 0))
                sample.steps_done = max(sample.steps_done, steps_done)
                if steps_done and group.binding is not None:
                    group.binding.note_begun(sample.sample_index)

    async def _shut_down(self) -> None:
        self._renewal.cancel()
        running = list(self._tasks.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if ray.is_initialized() == self._is_on_ray:
            await self._board.release.remote(self.lease_id)

    def _soon(self, work: Callable[..., object], *args: object) -> None:
        """Run ``work`` on the background loop; not once the client is closed, when every group has settled."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work, *args)

    def _await(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(timeout_s)
