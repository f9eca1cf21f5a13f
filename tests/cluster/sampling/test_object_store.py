"""Trajectories reach another process through the object store's shared memory, without a copy."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch
from apps import App

from pipeline.tensors import frozen, owned
from schemas.trajectory import read_trajectory

MIB = 2**20


def shared_memory() -> list[tuple[int, int]]:
    """Address ranges of this process in which the object store's files are mapped."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "plasma" in line:
            first, last = line.split()[0].split("-")
            ranges.append((int(first, 16), int(last, 16)))
    return ranges


def is_shared(address: int, num_bytes: int) -> bool:
    return any(first <= address and address + num_bytes <= last for first, last in shared_memory())


@ray.remote(num_cpus=0)
class Reader:
    """Another process, as a trainer's rank is."""

    def look(self, table: pa.Table) -> dict[str, Any]:
        trajectory = read_trajectory(table)
        seen: dict[str, Any] = {"num_bytes": table.nbytes, "log_probs": list(trajectory.log_prob_video)}
        for name in ("video_latents", "audio_latents"):
            array = getattr(trajectory, name)
            view, copy = frozen(array), owned(array)
            first = float(view.flatten()[0])
            try:
                view.mul_(2)
                raised = False
            except RuntimeError:
                raised = True
            copy.mul_(2)
            seen[name] = {
                "array_is_shared": is_shared(array.ctypes.data, array.nbytes),
                "array_is_writable": array.flags.writeable,
                "frozen_is_shared": is_shared(torch._C._data_address(view), array.nbytes),
                "frozen_raised": raised,
                "owned_is_shared": is_shared(copy.data_ptr(), array.nbytes),
                "unchanged": float(array.flat[0]) == first and float(copy.flatten()[0]) == 2 * first,
                "total": float(np.abs(array).astype(np.float64).sum()),
            }
        return seen


def test_another_process_reads_a_trajectory_where_it_lies(plain: App) -> None:
    request = {
        "prompt": "a wide view",
        "height": 512,
        "width": 512,
        "num_frames": 41,
        "num_inference_steps": 12,
        "return_steps": "all",
        "media": False,
    }
    with plain.client() as client:
        group = client.submit(request)
        client.gather([group], timeout_s=120)
        group.raise_if_failed()
    seen = ray.get(Reader.remote().look.remote(group.samples[0].trajectory))
    assert seen["num_bytes"] >= MIB
    own = read_trajectory(ray.get(group.samples[0].trajectory))
    assert seen["log_probs"] == list(own.log_prob_video)
    for name in ("video_latents", "audio_latents"):
        there = seen[name]
        assert there["array_is_shared"] and not there["array_is_writable"]
        assert there["frozen_is_shared"] and there["frozen_raised"]
        assert not there["owned_is_shared"] and there["unchanged"]
        assert there["total"] == float(np.abs(getattr(own, name)).astype(np.float64).sum())


def test_a_frozen_tensor_can_be_read_and_copied_but_not_written(plain: App) -> None:
    with plain.client() as client:
        group = client.submit({"prompt": "a wide view", "state_dtype": "bfloat16", "media": False})
        client.gather([group], timeout_s=120)
    trajectory = read_trajectory(ray.get(group.samples[0].trajectory))
    view = frozen(trajectory.video_latents, trajectory.state_dtype)
    assert view.dtype == torch.bfloat16 and (view + 1).shape == view.shape
    for write in (lambda: view.add_(1), lambda: view.zero_(), lambda: view[0].fill_(0)):
        with pytest.raises(RuntimeError):
            write()
    with pytest.raises(ValueError, match="read-only"):
        trajectory.video_latents[0] = 0
    mine = owned(trajectory.video_latents, torch_dtype=trajectory.state_dtype)
    assert torch.equal(mine, view)
    mine.requires_grad_().sum().backward()
    assert mine.grad is not None
