"""The connection to Ray that a process has, for what outlives the call that it was made in: threads, and whoever closes.

Ray starts a cluster by itself when a process without one makes a call. What began in a session therefore asks, before
each call, whether that session still stands, and makes none in another.
"""

import threading

import ray
from ray._private import auto_init_hook

from schemas.errors import Problem


class Session:
    """The session at the moment when this is made; where there is none, every session is taken for it."""

    def __init__(self) -> None:
        # The context is looked up once: the look-up is a call that would start Ray, and the context itself makes none.
        self._context = ray.get_runtime_context() if ray.is_initialized() else None
        self._id = self._present()

    @property
    def is_over(self) -> bool:
        """Whether the process has left the session, also for another one."""
        return self._id is not None and self._present() != self._id

    def check(self) -> None:
        """Raises RuntimeError (a Problem) when it is over."""
        if self.is_over:
            raise session_over().exception()

    def _present(self) -> str | None:
        if self._context is None or not ray.is_initialized():
            return None
        try:
            return str(self._context.get_worker_id())
        except (RuntimeError, AttributeError):  # it is being left at this moment
            return None


def session_over() -> Problem:
    return Problem(
        code="internal",
        rule="this process has left the Ray session that the call belongs to",
        remedy="call ray.init, and make another RolloutClient",
    )


class AutoStart:
    """Ray's habit of starting a cluster by itself, off while anybody forbids it: a call then raises instead.

    Serve's own threads go on with the calls that they hold when Ray is shut down, and they do not ask. Ray's own switch,
    RAY_ENABLE_AUTO_CONNECT=0, is no way out: such a call then ends the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_forbidding = 0
        self._start = auto_init_hook.auto_init_ray

    def forbid(self) -> None:
        with self._lock:
            self._num_forbidding += 1
            auto_init_hook.auto_init_ray = _refuse

    def allow(self) -> None:
        """Take one `forbid` back."""
        with self._lock:
            self._num_forbidding -= 1
            if self._num_forbidding == 0:
                auto_init_hook.auto_init_ray = self._start


def _refuse() -> None:
    if not ray.is_initialized():
        raise session_over().exception()


AUTO_START = AutoStart()
"""Of this process."""
