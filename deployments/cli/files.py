"""Files that are whole or not there: what is being written has another name until it is done, and is gone if it fails.

A place is tried before anything is asked for, so that what cannot be written is told before it is sampled.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from deployments.cli.http import USAGE, Failure


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """An empty file beside ``path`` to write to. It takes the place of what is there when the block ends well, and is
    removed when it does not. Raises Failure where none can be written."""
    with _made(path.parent):
        part = path.with_name(_part_name())
        with _told():
            _look(path)
            part.touch(exist_ok=False)
        try:
            yield part
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def stage_in(folder: Path) -> Iterator[Path]:
    """An empty folder within ``folder``, from which files can be moved to it. It is removed at the end with what is left.
    Raises Failure where nothing can be written."""
    with _made(folder):
        stage = folder / _part_name()
        with _told():
            stage.mkdir()
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def is_there(path: Path) -> bool:
    """Whether anything is, also a link that leads nowhere. Raises Failure for what can be no path."""
    with _told():
        return _look(path)


def _look(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _part_name() -> str:
    return f".{uuid4().hex}.part"


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder; when the block fails, those that were made for it go again."""
    with _told():
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for place in missing:
            with suppress(OSError):
                place.rmdir()
        raise


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Failure(f"nothing can be written there: {error}; choose another place", USAGE) from None
