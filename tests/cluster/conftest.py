"""One local Ray cluster with Serve's HTTP proxy for all tests of this folder, and apps that several of them share.

Every port is found free and every file lies in a folder of the cluster's own, so that clusters on one machine do not
meet. A process of a replica takes seconds to import what it needs, so apps are few.
"""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import variants
from apps import KEEP_BYTES, MAX_ROLLOUTS, NUM_DENOISERS, ROOM_OF_PLAIN, App, deployed
from learning import Learning
from ray import serve

from configs.settings import AppConfig
from deployments.graph import bind

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
        _system_config={"metrics_report_interval_ms": 1000},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": http_port})
    try:
        yield http_port
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def plain(port: int) -> Iterator[App]:
    """One replica of each stage with the tiny preset's batching, little room, and narrow HTTP limits."""
    http = {
        "max_rollouts": MAX_ROLLOUTS,
        "max_num_samples": 8,
        "max_body_bytes": 20_000,
        "keep_bytes": KEEP_BYTES,
    }
    config = AppConfig(http=http)
    app = bind(
        config,
        text_encoder=variants.SlowableTextEncoder,
        denoiser=variants.TellingDenoiser,
        av_decoder=variants.SlowableDecoder,
        archive=variants.TellingArchive,
        ingress=variants.TellingIngress,
        options={
            "Denoiser": ROOM_OF_PLAIN,
            **{stage: {"max_ongoing_requests": 64} for stage in ("Ingress", "TextEncoder")},
        },
    )
    with deployed("plain", app, port) as running:
        yield running


@pytest.fixture(scope="session")
def four(port: int) -> Iterator[App]:
    """Four slow denoisers that hold one row each, whose bits do not depend on who else is there."""
    soon_missed = {"health_check_period_s": 1}
    config = AppConfig(
        batch_invariant=True,
        denoiser={"row_buckets": [1]},
        client={"lease_s": 4.0, "pulse_s": 0.25},
    )
    app = bind(
        config,
        text_encoder=variants.SlowableTextEncoder,
        denoiser=variants.SlowDenoiser,
        av_decoder=variants.SlowableDecoder,
        lease_board=variants.TellingLeaseBoard,
        options={
            "Denoiser": {"num_replicas": NUM_DENOISERS, "max_ongoing_requests": 16, **soon_missed},
            **{name: soon_missed for name in ("TextEncoder", "AVDecoder", "LeaseBoard")},
        },
    )
    with deployed("four", app, port) as running:
        yield running


@pytest.fixture(scope="session")
def learning(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learning]:
    """Two slow denoisers with little room, whose policy is published to and kept on disk."""
    with Learning("learning", port, tmp_path_factory.mktemp("weights")).running() as app:
        yield app
