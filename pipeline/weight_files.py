"""Weights on disk: a safetensors file, or a folder of them, read lazily.

A folder is a diffusers component (one file or shards, with or without their index), or an adapter as PEFT saves
it. Nothing is unpickled. Bytes are mapped, and read when they are first used.

Knows no transformer: whether names and shapes fit is not said here.

Invariant: whatever cannot be read whole is refused before its first tensor is handed out, with the file's name.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from schemas.errors import Problem
from schemas.weights import TensorSpec
from schemas.weights_check import STILL_SERVED, listed

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
DIFFUSERS_CONFIG_KEY = "lora_adapter_metadata"
"""Where diffusers puts PEFT's configuration in a file's metadata: `save_lora_adapter` as it is, a pipeline's
`save_lora_weights` with the component before each key."""
PREFIX = "transformer."


def read_file(path: str | Path) -> Iterator[Mapping[str, Tensor]]:
    """Per file its tensors by name, mapped from disk and private to this process: for `chunks_of`.

    Raises ValueError (a Problem) that names the file for what is not there, truncated, or no safetensors, for a
    name in two files, and for an index that says otherwise than its files; all of it at the first `next`.
    """
    for file, specs in _headers(Path(path)).items():
        with _opened(file) as content:
            yield {name: content.get_tensor(name) for name in specs}


def specs_of_file(path: str | Path) -> dict[str, TensorSpec]:
    """Dtype and shape of each tensor, from the headers alone. Raises as `read_file` does."""
    return {name: spec for specs in _headers(Path(path)).values() for name, spec in specs.items()}


def lora_config_of(path: str | Path) -> dict[str, Any] | None:
    """PEFT's configuration beside the adapter: of its folder's adapter_config.json, or of diffusers' metadata
    in the file. None where there is neither. Raises ValueError (a Problem) where it cannot be read."""
    path = Path(path)
    config = (path if path.is_dir() else path.parent) / ADAPTER_CONFIG
    if config.is_file():
        return _json(config)
    for file in _files(path, _index(path)):
        with _opened(file) as content:
            text = (content.metadata() or {}).get(DIFFUSERS_CONFIG_KEY)
        if text is not None:
            entries = _object(file, text)
            own = {k.removeprefix(PREFIX): v for k, v in entries.items() if k.startswith(PREFIX)}
            return own or entries
    return None


def _headers(path: Path) -> dict[Path, dict[str, TensorSpec]]:
    """What each file holds, once all of them are known to be whole and to agree with one another."""
    index = _index(path)
    headers = {file: _header(file) for file in _files(path, index)}
    place: dict[str, Path] = {}
    for file, specs in headers.items():
        for name in specs:
            if name in place:
                rule = f"must be in one file, is in {place[name].name} and {file.name}"
                raise _refused(path, f"{name} {rule}", "keep one variant of the weights there").exception()
            place[name] = file
    wrong = [
        name
        for name in index.keys() | place.keys()
        if index and index.get(name) != getattr(place.get(name), "name", None)
    ]
    if wrong:
        rule = f"must hold what their index says, {listed(sorted(wrong))} do not"
        raise _refused(path, rule, "save it again").exception()
    return headers


def _index(path: Path) -> dict[str, str]:
    """Name to file, of a folder with an index; empty without one."""
    found = sorted(path.glob(f"*{INDEX_SUFFIX}")) if path.is_dir() else []
    if len(found) > 1:
        raise _refused(
            path, f"must have one index, has {', '.join(f.name for f in found)}", "keep one"
        ).exception()
    weight_map = _json(found[0]).get("weight_map") if found else {}
    if not isinstance(weight_map, dict):
        raise _refused(found[0], "must have a weight_map", "save it again").exception()
    return weight_map


def _files(path: Path, index: Mapping[str, str]) -> list[Path]:
    if path.is_file() and path.name.endswith(SUFFIX):
        return [path]
    if not path.is_dir():
        rule = (
            f"must be a {SUFFIX} file or a folder of them" if path.exists() else "must exist on this machine"
        )
        raise _refused(path, rule, "give the path of what save_pretrained or save_file wrote").exception()
    files = sorted({path / name for name in index.values()} or path.glob(f"*{SUFFIX}"))
    if not files:
        inner = path / "transformer"
        remedy = f"use {inner}" if inner.is_dir() else "save with safe_serialization=True"
        raise _refused(path, f"must hold a {SUFFIX} file", remedy).exception()
    return files


def _header(file: Path) -> dict[str, TensorSpec]:
    with _opened(file) as content:
        parts = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  # no mapping
        unknown = [
            f"{name} {part.get_dtype()}" for name, part in parts.items() if part.get_dtype() not in _DTYPES
        ]
        if unknown:
            rule = f"must hold tensors of {', '.join(_DTYPES)}, {len(unknown)} are of another dtype ({listed(unknown)})"
            raise _refused(file, rule, "cast them to the transformer's dtypes").exception()
        return {
            name: TensorSpec(dtype=_DTYPES[part.get_dtype()], shape=tuple(part.get_shape()))
            for name, part in parts.items()
        }


def _opened(file: Path) -> Any:
    """The file, of which safetensors has found the header to fit the length."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        rule = f"must be a whole {SUFFIX} file: {error}"
        raise _refused(file, rule, "write it again, and publish it once it is closed").exception() from error


def _json(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(file, f"must be readable: {error}", "write it again").exception() from error
    return _object(file, text)


def _object(file: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(file, f"must hold JSON: {error}", "write it again").exception() from error
    if not isinstance(content, dict):
        raise _refused(file, "must hold a JSON object", "write it again").exception()
    return content


def _refused(path: Path, rule: str, remedy: str) -> Problem:
    return Problem(
        code="weights_refused", field="path", value=str(path), rule=rule, remedy=f"{remedy}; {STILL_SERVED}"
    )


_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
