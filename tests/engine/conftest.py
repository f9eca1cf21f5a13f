"""An engine of its own for each test, over a transformer that computes nothing, and the time it goes by."""

import pytest

from pipeline.engine import Engine
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from tests.engines import Clock, StillTransformer


@pytest.fixture
def still() -> StillTransformer:
    return StillTransformer()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(still: StillTransformer, card: ModelCard, clock: Clock) -> Engine:
    """Moves every sample in no time."""
    return Engine(VelocityModel(still), card, row_buckets=(1, 2, 4, 8), clock=clock)
