"""Takes turns between contenders, and reports medians, spreads and ratios with the hardware they were taken on.

Machines that run benchmarks are shared and drift: contenders take turns, A B A B ..., and a ratio is taken within each
turn before its median is.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]
"""Of a table: its cells by column."""
LIBRARIES = ("torch", "diffusers", "transformers", "ray", "pyarrow", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Of repeated figures: the middle one and the extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g})"

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "min": self.low, "max": self.high}


def take_turns(contenders: Mapping[str, Callable[[], float]], *, turns: int) -> dict[str, list[float]]:
    """Run every contender once per turn, in turn; each returns its figure. The first turn warms up and is dropped."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, run in contenders.items():
            figure = run()
            if turn:
                figures[name].append(figure)
    return figures


def seconds(work: Callable[[], object]) -> float:
    """Wall time of a call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Turn by turn, how often the first goes into the second: with times, how much faster ``under`` is."""
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])


def report(
    name: str,
    rows: Sequence[Row],
    *,
    profile: Sequence[Row] = (),
    notes: Sequence[str] = (),
) -> None:
    """Print the table of ``rows`` and the one of ``profile``, which says where the time goes, and write both to
    ``results/<name>.json`` with the hardware and the versions."""
    _print_table(name, rows)
    if profile:
        _print_table(f"{name}: where the time goes", profile)
    for note in notes:
        print(f"* {note}")
    RESULTS.mkdir(exist_ok=True)
    result = {
        "benchmark": name,
        "taken": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "versions": {library: version(library) for library in LIBRARIES},
        "rows": _plain_rows(rows),
        "profile": _plain_rows(profile),
        "notes": list(notes),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def hardware() -> dict[str, Any]:
    """What the figures were taken on."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": gpu,
        "system": platform.platform(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def _print_table(title: str, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    print(f"\n{title}")
    for line in [columns, ["-" * width for width in widths], *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _plain_rows(rows: Sequence[Row]) -> list[dict[str, object]]:
    return [{key: _plain(value) for key, value in row.items()} for row in rows]


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value: object) -> object:
    return value.as_dict() if isinstance(value, Spread) else value
