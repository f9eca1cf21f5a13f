"""An app behind a real HTTP server, with an archive that needs no cluster, for the command line to talk to."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from configs.settings import HttpSettings
from deployments.http.api import http_app
from deployments.kept.api import Submitted
from schemas.control import Control, Fleet, ReplicaState
from tests.fake_archive import FakeArchive
from tests.patience import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
FLEET = Fleet(
    control=Control(version=3),
    replicas=(
        ReplicaState(replica_id="denoiser-0", version=3, weights_digest="ab" * 16, run="running"),
        ReplicaState(replica_id="denoiser-1", version=2, weights_digest="cd" * 16, run="running"),
    ),
    kept_versions=(2, 3),
)


class Archive(FakeArchive):
    """Remembers what it was asked for."""

    asked: dict[str, Any]

    async def submit(self, request: dict[str, Any], *, from_http: bool = True) -> Submitted:
        self.asked = request
        return await super().submit(request, from_http=from_http)


def app_of(archive: Archive, **settings: Any) -> FastAPI:
    async def fleet() -> Fleet:
        return FLEET

    return http_app(archive, fleet, checkpoint="tiny", settings=HttpSettings(**settings))


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of an app behind uvicorn."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listening.close()
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def nobody() -> Iterator[str]:
    """An address at which nobody listens, and nobody can begin to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def interrupted(archive: Archive, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command line leaves behind as a process that gets Ctrl-C once the archive has it waiting for a rollout."""
    command = [sys.executable, "-m", "deployments.cli", *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_from_a_terminal,
    )
    try:
        until(
            lambda: (
                any(rollout.num_waiting for rollout in archive.shelf.running) or process.poll() is not None
            )
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def canned(answer: httpx.Response) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: answer)


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def as_from_a_terminal() -> None:
    """A shell's background jobs, as these tests may be, ignore Ctrl-C, and what they start inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
