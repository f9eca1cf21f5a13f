"""`inspect`: what a folder that `rollout` wrote holds, as a table and a picture. Nothing is sent anywhere."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from deployments.cli.files import whole_file
from deployments.cli.http import DONE, USAGE, Failure
from deployments.cli.run_folder import MANIFEST, is_own
from deployments.cli.table import lined_up

PICTURE = "log-probs.png"
HEADER = ("sample", "version", "states", "log-prob video", "log-prob audio", "denoise s", "bytes", "")


def inspect(args: Namespace) -> int:
    """Print the samples' numbers, and draw their log-probs into the folder."""
    folder = Path(args.folder)
    manifest = _manifest(folder)
    try:
        tables = [_table(folder, names["trajectory"]) for names in _with_trajectory(manifest)]
        rows_of = {_sample_index(table): table.num_rows for table in tables}
        request, samples = manifest["request"], [_numbers(each, rows_of) for each in manifest["samples"]]
        told = {"request_id": manifest["request_id"], "request": request, "samples": samples}
        head = f"{request['prompt']!r}, seed {request['seed']}, {request['num_inference_steps']} steps"
        lines = lined_up([HEADER, *map(_line, samples)])
        picture = None if args.no_png or not tables else _draw(tables, folder / PICTURE)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, error) from None
    print(json.dumps({**told, "picture": picture}) if args.json else f"{head}\n{lines}")
    if picture is not None and not args.json:
        print(picture)
    return DONE


def _manifest(folder: Path) -> Any:
    path = folder / MANIFEST
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise Failure(f"{path} is not there; name a folder that `rollout --out` wrote", USAGE) from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from None


def _with_trajectory(manifest: Any) -> list[dict[str, Any]]:
    return [names for names in manifest["files"]["samples"] if "trajectory" in names]


def _table(folder: Path, name: object) -> pa.Table:
    """The table of a file in the folder, mapped from disk."""
    if not is_own(name):
        raise Failure(f"{folder / MANIFEST} names {name!r}, which is no file of a rollout", USAGE)
    path = folder / str(name)
    try:
        with pa.memory_map(str(path)) as file:
            return pa.ipc.open_stream(file).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise _damaged(path, error) from None


def _damaged(place: Path, error: Exception) -> Failure:
    return Failure(f"{place} cannot be read, it is damaged or no rollout: {error!r}; fetch it again", USAGE)


def _sample_index(table: pa.Table) -> int:
    index: int = json.loads(table.schema.metadata[b"manifest"])["sample_index"]
    return index


def _numbers(sample: dict[str, Any], rows_of: dict[int, int]) -> dict[str, Any]:
    timings = sample["timings"] or {}
    return {
        "sample_index": sample["sample_index"],
        "policy_version": sample["policy_version"],
        "num_states": rows_of.get(sample["sample_index"]),
        "mean_log_prob_video": _mean(sample["log_probs_video"]),
        "mean_log_prob_audio": _mean(sample["log_probs_audio"]),
        "denoise_s": timings.get("denoise_s"),
        "trajectory_bytes": sample["trajectory_bytes"],
        "problem": sample["problem"],
    }


def _mean(log_probs: Sequence[float | None] | None) -> float | None:
    """Over the steps that have one."""
    there = [value for value in log_probs or () if value is not None]
    return sum(there) / len(there) if there else None


def _line(numbers: dict[str, Any]) -> tuple[str, ...]:
    problem = numbers["problem"]
    shown = [
        numbers["sample_index"],
        numbers["policy_version"],
        numbers["num_states"],
        *(numbers[f"mean_log_prob_{modality}"] for modality in ("video", "audio")),
        numbers["denoise_s"],
        numbers["trajectory_bytes"],
    ]
    return (*map(_cell, shown), "" if problem is None else f"{problem['code']}: {problem['rule']}")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _draw(tables: Sequence[pa.Table], path: Path) -> str:
    from pipeline.plot import save_log_probs_png  # with torch and matplotlib, which only a picture needs

    with whole_file(path) as part:
        save_log_probs_png(tables, part)
    return str(path)
