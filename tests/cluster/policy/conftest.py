"""The app that tests of a changing policy share."""

from collections.abc import Iterator

import pytest
from learning import Learning, sampled


@pytest.fixture(scope="package")
def learning(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learning]:
    """Two slow denoisers with little room, whose policy is published to and kept on disk, where an earlier one lies."""
    app = Learning("learning", port, tmp_path_factory.mktemp("weights"))
    app.left = app.leave_on_disk()
    with app.running(), app.client() as client:
        app.first = sampled(client, num_samples=2)
        yield app
