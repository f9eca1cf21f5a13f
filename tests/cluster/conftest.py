"""One Ray cluster for all tests of this folder.

A replica's process takes ten seconds of a core to import what it needs and does not idle for nothing, so apps are few, and
one is there at a time: each folder has one, which its tests share and which goes with the last of them.
"""

from collections.abc import Iterator

import pytest
from clusters import cluster, free_port


@pytest.fixture(scope="session")
def metrics_port() -> int:
    """Where the cluster exports its metrics on 127.0.0.1."""
    return free_port()


@pytest.fixture(scope="session")
def port(metrics_port: int) -> Iterator[int]:
    """The cluster's HTTP port on 127.0.0.1; the cluster lives as long as this fixture."""
    with cluster(metrics_port) as http_port:
        yield http_port
