"""Which folder a path in a request leads to, if it may be read at all.

A path is taken where it ends up once every symbolic link is followed: it must lie under the root, and so must each file
that would be read there, also one that an index names.

What changes on disk between this check and the reading is the business of whoever may write under the root.
"""

import json
from pathlib import Path

from schemas.errors import Problem, invalid
from schemas.sglang_weights import MODULE

FIELD = "model_path"
SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"


def weights_under(root: str | None, given: str) -> Path:
    """The transformer's folder or file that ``given`` names, from ``root`` where it is relative. Raises ValueError (a
    Problem)."""
    if root is None:
        rule = "cannot be read: no folder of weights is open to HTTP"
        remedy = "set http.weights_root, or publish with RolloutClient.publish_weights"
        raise invalid(FIELD, given, rule, remedy).exception()
    top = Path(root).expanduser().resolve()
    place = _inside(top, top / given, given)
    place = _inside(top, place / MODULE, given) if (place / MODULE).is_dir() else place
    files = [place] if place.is_file() else _files(place, given)
    if not files:
        rule = f"must be a {SUFFIX} file, or a folder of them or with a folder {MODULE} of them, under http.weights_root"
        raise invalid(FIELD, given, rule, "save with safe_serialization=True").exception()
    for file in files:
        if not _inside(top, file, given).is_file():
            rule = f"must hold whole files, {file.name} is none"
            raise invalid(FIELD, given, rule, "save it again").exception()
    return place


def _files(folder: Path, given: str) -> list[Path]:
    """All files there that are read for weights."""
    try:
        named = [
            folder / name
            for index in folder.glob(f"*{INDEX_SUFFIX}")
            for name in json.loads(index.read_text())["weight_map"].values()
        ]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise invalid(
            FIELD, given, f"has an index that cannot be read: {error}", "save it again"
        ).exception() from None
    return [*folder.glob(f"*{SUFFIX}"), *named]


def _inside(top: Path, path: Path, given: str) -> Path:
    try:
        place = path.resolve()
    except (OSError, RuntimeError):  # links that lead in a circle
        place = path
        is_inside = False
    else:
        is_inside = place.is_relative_to(top)
    if not is_inside:
        rule, remedy = "must lie under http.weights_root, with all that it links to", "save or copy it there"
        raise Problem(code="invalid_request", field=FIELD, value=given, rule=rule, remedy=remedy).exception()
    return place
