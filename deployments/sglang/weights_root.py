"""Which folder a path in a request leads to, if it may be read at all.

A path is taken where it ends up once every symbolic link is followed: it must lie under the root, and so must each file
that is read there: weights, the index that names them, an adapter's configuration. Each is looked at before it is opened.

What changes on disk between this check and the reading is the business of whoever may write under the root.
"""

import json
import os
from pathlib import Path

from schemas.errors import Problem, invalid
from schemas.sglang_weights import MODULE

FIELD = "model_path"
SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"


def weights_under(root: str | None, given: str) -> Path:
    """The transformer's folder or file that ``given`` names, from ``root`` where it is relative. Raises ValueError (a
    Problem)."""
    if root is None:
        rule = "cannot be read: no folder of weights is open to HTTP"
        remedy = "set http.weights_root, or publish with RolloutClient.publish_weights"
        raise invalid(FIELD, given, rule, remedy).exception()
    try:
        return _Root(root, given).place()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        rule = f"cannot be read: {error.strerror}"
        raise invalid(FIELD, given, rule, "name a folder under http.weights_root").exception() from None


class _Root:
    """A root, and what a request names under it."""

    def __init__(self, root: str, given: str) -> None:
        self._top, self._given = Path(root).expanduser().resolve(), given

    def place(self) -> Path:
        place = self._inside(self._top / self._given)
        if (place / MODULE).is_dir():
            place = self._inside(place / MODULE)
        if not place.is_dir():
            files = [place] if place.name.endswith(SUFFIX) else []
        else:
            files = [*place.glob(f"*{SUFFIX}"), *self._indexed(place)]
        if not files:
            rule = f"must be a {SUFFIX} file, or a folder of them or with a folder {MODULE} of them, under http.weights_root"
            raise self._refused(rule, "save with safe_serialization=True").exception()
        config = (place if place.is_dir() else place.parent) / ADAPTER_CONFIG
        for file in [*files, config] if os.path.lexists(config) else files:
            self._check_file(file)
        return place

    def _indexed(self, folder: Path) -> list[Path]:
        """The files that the folder's indexes name."""
        named: list[Path] = []
        for index in folder.glob(f"*{INDEX_SUFFIX}"):
            self._check_file(index)
            try:
                names = set(json.loads(index.read_text())["weight_map"].values())
                named += [folder / name for name in names]
            except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
                rule = f"has an index that cannot be read: {error}"
                raise self._refused(rule, "save it again").exception() from None
        for file in named:
            if not file.name.endswith(SUFFIX):
                rule = f"has an index that names what is no {SUFFIX} file: {file.name}"
                raise self._refused(rule, "save with safe_serialization=True").exception()
        return named

    def _check_file(self, file: Path) -> None:
        """Raises ValueError (a Problem) unless it is a file and lies under the root."""
        if not self._inside(file).is_file():
            raise self._refused(f"must hold whole files, {file.name} is none", "save it again").exception()

    def _inside(self, path: Path) -> Path:
        try:
            place = path.resolve()
            is_inside = place.is_relative_to(self._top)
        except (
            OSError,
            RuntimeError,
            ValueError,
        ):  # links that lead in a circle, names that can be no file's
            is_inside = False
        if not is_inside:
            rule, remedy = (
                "must lie under http.weights_root, with all that it links to",
                "save or copy it there",
            )
            raise self._refused(rule, remedy).exception()
        return place

    def _refused(self, rule: str, remedy: str) -> Problem:
        return invalid(FIELD, self._given, rule, remedy)
