"""A policy over a transformer of its own, and a trainer beside it."""

import pytest
from diffusers import LTX2VideoTransformer3DModel

from pipeline.policy import Policy
from tests.weights import fresh


@pytest.fixture
def model() -> LTX2VideoTransformer3DModel:
    """A transformer of one's own."""
    return fresh()


@pytest.fixture
def policy(model: LTX2VideoTransformer3DModel) -> Policy:
    return Policy(model)


@pytest.fixture
def trainer() -> LTX2VideoTransformer3DModel:
    """The trainer's own copy of the checkpoint."""
    return fresh()
