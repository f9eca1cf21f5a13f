"""Where a contender's time goes: seconds in each module's forward calls, and CPU seconds of each process."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def module_seconds(modules: Mapping[str, torch.nn.Module]) -> Iterator[dict[str, float]]:
    """Wall seconds that each module's forward calls took while the block lasted; whole ones, the device waited for."""
    taken: dict[str, float] = dict.fromkeys(modules, 0.0)
    started: dict[str, float] = {}

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            started[name] = now()

        return hook

    def end(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            taken[name] += now() - started[name]

        return hook

    hooks = [
        hook
        for name, module in modules.items()
        for hook in (
            module.register_forward_pre_hook(begin(name)),
            module.register_forward_hook(end(name)),
        )
    ]
    try:
        yield taken
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def process_seconds() -> Iterator[dict[str, float]]:
    """CPU seconds of this process and of those that it started, by title, while the block lasted; filled in at its end."""
    spent: dict[str, float] = defaultdict(float)
    before = _cpu_by_process()
    yield spent
    for process, seconds in _cpu_by_process().items():
        spent[process[1]] += seconds - before.get(process, 0.0)


def _cpu_by_process() -> dict[tuple[int, str], float]:
    """CPU seconds so far, by process id and title, of this process and its descendants (Linux)."""
    parents: dict[int, int] = {}
    spent: dict[tuple[int, str], float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            title = (entry / "cmdline").read_text().split("\0")[0]
        except OSError:  # it has ended
            continue
        parents[int(entry.name)] = int(fields[1])
        ticks = int(fields[11]) + int(fields[12])
        spent[int(entry.name), title] = ticks / os.sysconf("SC_CLK_TCK")
    return {process: seconds for process, seconds in spent.items() if _is_ours(process[0], parents)}


def _is_ours(process_id: int, parents: Mapping[int, int]) -> bool:
    while process_id not in (0, os.getpid()):
        process_id = parents.get(process_id, 0)
    return process_id == os.getpid()
