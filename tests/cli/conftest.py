"""One served app for the tests of a file."""

from collections.abc import Iterator

import pytest

from tests.cli.serving import Archive, app_of, served


@pytest.fixture(scope="module")
def archive() -> Archive:
    return Archive(keep_bytes=2**40)


@pytest.fixture(scope="module")
def url(archive: Archive) -> Iterator[str]:
    with served(app_of(archive)) as address:
        yield address
