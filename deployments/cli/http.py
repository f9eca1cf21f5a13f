"""The command line's way to a running app: requests over HTTP, events as they come, and files.

Every failure is a `Failure`, with the words for a person, the exit code and the app's own problem details.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

DONE, FAILED, USAGE, NO_APP, STOPPED = 0, 1, 2, 3, 130
"""Exit codes. USAGE: asked in a way that cannot be answered, so that trying again does not help. STOPPED: by Ctrl-C."""

TOKEN_VARIABLE = "LTX_ROLLOUT_TOKEN"
CONNECT_S = 5.0
SILENCE_S = 60.0
"""Longest time between two words of an app that samples: it says every few seconds that it is still there."""
FILE_S = 600.0
"""Longest wait for a file's next bytes; a video is encoded before its first."""


class Failure(Exception):
    """Told to the caller as one line, without a traceback; for machines beside ``done``, what was done all the same."""

    def __init__(
        self,
        message: str,
        code: int = FAILED,
        problem: dict[str, Any] | None = None,
        done: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.problem, self.done = message, code, problem, done or {}


class Api:
    """One app."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        """``transport``: another way than the network, for tests. Raises Failure for what is no address."""
        self.url = url.rstrip("/")
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not (token.isascii() and token.isprintable()):
            rule = "must be printable ASCII characters on one line"
            raise Failure(f"{TOKEN_VARIABLE} {rule}; set it to the token of the app alone", USAGE)
        try:
            self._origin = httpx.URL(self.url)
            if self._origin.scheme not in ("http", "https") or not self._origin.host:
                raise httpx.InvalidURL("it must begin with http:// or https:// and a host")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise Failure(f"--url {url!r} cannot be used: {error}", USAGE) from None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        self._http = httpx.Client(headers=headers, timeout=timeout, transport=transport)

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def read(self, path: str) -> Any:
        """The JSON at a path of the app."""
        with self._talking():
            return _json(self._good(self._http.get(f"{self.url}{path}")))

    def events(self, path: str, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Name and data of each event that the app answers ``body`` with. Closing the iterator hangs up.

        Raises Failure for what JSON cannot hold.
        """
        headers = {"Accept": "text/event-stream", "Content-Type": "application/json"}
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise Failure(f"the request must be JSON: {error}; numbers must be finite", USAGE) from None
        with (
            self._talking(),
            self._http.stream("POST", f"{self.url}{path}", content=content, headers=headers) as answer,
        ):
            if not answer.is_success:
                answer.read()
            yield from _events(self._good(answer))

    def download(self, link: str, path: Path) -> int:
        """Put what is at ``link``, a path on the app's host, into a file; returns its bytes."""
        address = self._origin.copy_with(raw_path=link.encode())
        with (
            self._talking(),
            self._http.stream("GET", address, timeout=httpx.Timeout(FILE_S, connect=CONNECT_S)) as answer,
        ):
            if not answer.is_success:
                answer.read()
            self._good(answer)
            with path.open("wb") as file:
                return sum(file.write(piece) for piece in answer.iter_bytes())

    def _good(self, answer: httpx.Response) -> httpx.Response:
        if answer.is_success:
            return answer
        problem = _problem_of(answer)
        if problem is not None:
            raise failure_of(problem)
        if answer.status_code == 404:
            raise Failure(
                f"at {self.url} something answers, but not this app; give its address with --url", NO_APP
            )
        raise Failure(f"the app answered {answer.status_code} without saying why; see its log")

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout):
            remedy = "start one with `serve run serve_config.yaml`, or give its address with --url"
            raise Failure(f"no app answers at {self.url}; {remedy}", NO_APP) from None
        except httpx.TimeoutException:
            raise Failure(f"the app at {self.url} fell silent; see its log") from None
        except httpx.HTTPError as error:
            raise Failure(f"the connection to {self.url} broke: {error or type(error).__name__}") from None


def failure_of(problem: dict[str, Any]) -> Failure:
    """The failure that problem details tell of."""
    usage = problem.get("code") == "invalid_request"
    return Failure(str(problem.get("detail") or problem.get("rule")), USAGE if usage else FAILED, problem)


def _events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer.iter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        raise Failure("what answers there is not this app; give its address with --url", NO_APP) from None


def _problem_of(answer: httpx.Response) -> dict[str, Any] | None:
    try:
        told = answer.json()
    except ValueError:
        return None
    return told if isinstance(told, dict) and "code" in told and "rule" in told else None
