"""One local Ray cluster with Serve's HTTP proxy for all tests of this folder.

Every port is found free and every file lies in a folder of the cluster's own, so that clusters on one machine do not meet.

A replica's process takes ten seconds of a core to import what it needs and does not idle for nothing, so apps are few, and
one is there at a time: each folder has one, which its tests share and which goes with the last of them.
"""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from apps import EXPORT_S
from ray import serve

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """Of 127.0.0.1, free at this moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="session")
def metrics_port() -> int:
    """Where the cluster exports its metrics on 127.0.0.1."""
    return free_port()


@pytest.fixture(scope="session")
def port(metrics_port: int) -> Iterator[int]:
    """The cluster's HTTP port on 127.0.0.1; the cluster lives as long as this fixture."""
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # For the workers: the project, and the variants that tests bind.
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }
    http_port = free_port()
    # Short, since the paths of Unix sockets are.
    folder = tempfile.mkdtemp(prefix="ltx", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=32,  # slots, not cores: most of what runs here waits
        object_store_memory=2**30,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
        _metrics_export_port=metrics_port,
        _system_config={"metrics_report_interval_ms": int(1000 * EXPORT_S)},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": http_port})
    try:
        yield http_port
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
