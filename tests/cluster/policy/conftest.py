"""The app that tests of a changing policy share."""

from collections.abc import Iterator

import pytest
from learning import Learning


@pytest.fixture(scope="package")
def learning(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learning]:
    """Two slow denoisers with little room, whose policy is published to and kept on disk."""
    with Learning("learning", port, tmp_path_factory.mktemp("weights")).running() as app:
        yield app
