"""The app that tests of several denoisers share."""

from collections.abc import Iterator

import pytest
import telling
import variants
from apps import NUM_DENOISERS, App, deployed

from configs.settings import AppConfig
from deployments.graph import bind


@pytest.fixture(scope="package")
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
        lease_board=telling.TellingLeaseBoard,
        options={
            "Denoiser": {"num_replicas": NUM_DENOISERS, "max_ongoing_requests": 16, **soon_missed},
            **{name: soon_missed for name in ("TextEncoder", "AVDecoder", "LeaseBoard")},
        },
    )
    with deployed("four", app, port) as running:
        yield running
