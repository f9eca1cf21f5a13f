"""The app that tests of one rollout's way share."""

from collections.abc import Iterator

import pytest
import telling
import variants
from apps import KEEP_BYTES, MAX_ROLLOUTS, ROOM_OF_PLAIN, App, deployed

from configs.settings import AppConfig
from deployments.graph import bind


@pytest.fixture(scope="package")
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
        archive=telling.TellingArchive,
        ingress=telling.TellingIngress,
        options={
            "Denoiser": ROOM_OF_PLAIN,
            **{stage: {"max_ongoing_requests": 64} for stage in ("Ingress", "TextEncoder")},
        },
    )
    with deployed("plain", app, port) as running:
        yield running
