"""The folder of a rollout: which files in it are a rollout's own, and how one rollout takes the place of another.

A folder is whole when its manifest.json is there: it is written last, and is the first to go. Only files that the
manifest names are removed, and only names that a rollout gives are taken from it.
"""

import json
import re
from pathlib import Path

from deployments.cli.files import is_there
from deployments.cli.http import USAGE, Failure

MANIFEST = "manifest.json"
CONDITIONING = "conditioning.arrows"
SUFFIXES = {"trajectory": "arrows", "mp4": "mp4"}
"""Of a sample's files, by what they hold."""
_SAMPLE = re.compile(r"sample-[0-9]+\.(arrows|mp4)")


def sample_file(index: int, kind: str) -> str:
    """Name of a sample's file."""
    return f"sample-{index}.{SUFFIXES[kind]}"


def is_own(name: object) -> bool:
    """Whether a rollout gives its files such a name; a path is none."""
    return isinstance(name, str) and (name in (MANIFEST, CONDITIONING) or bool(_SAMPLE.fullmatch(name)))


def refuse_taken(folder: Path, *, force: bool) -> None:
    """Raise Failure where a rollout cannot be put, or not without writing over something."""
    if not is_there(folder):
        return
    if not folder.is_dir():
        raise Failure(f"{folder} is not a folder; choose another place", USAGE)
    for file in sorted(file for file in folder.iterdir() if is_own(file.name)):
        if not force:
            raise Failure(f"{file} is there already; choose another place, or add --force", USAGE)
        if file.is_dir():
            raise Failure(f"{file} is a folder; choose another place", USAGE)


def move_in(stage: Path, folder: Path) -> None:
    """Move a whole rollout from ``stage`` to ``folder``, in place of the one that is there."""
    earlier = _files_of(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in earlier:
        (folder / name).unlink(missing_ok=True)
    for file in sorted(stage.iterdir(), key=lambda file: file.name == MANIFEST):
        file.replace(folder / file.name)


def _files_of(folder: Path) -> set[str]:
    """Names of the files of the rollout that is there; none where the manifest tells of none."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        named = [
            files["conditioning"],
            *(sample.get(kind) for sample in files["samples"] for kind in SUFFIXES),
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()
    return {name for name in named if is_own(name)}
