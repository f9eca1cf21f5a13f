"""What an engine cannot sample is refused when it is submitted."""

from collections.abc import Callable

import pytest

from pipeline.conditioning import Conditioning
from pipeline.engine import Engine
from pipeline.sample import Job
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from tests.engines import Order, StillTransformer


def test_a_guided_job_without_the_negative_prompts_contexts_is_refused_when_it_is_submitted(
    still: StillTransformer, card: ModelCard, order: Order, condition: Callable[..., Conditioning]
) -> None:
    engine = Engine(VelocityModel(still), card, row_buckets=(4,))
    job = order(guidance={"video": 2.0}, job={"conditioning": condition("a red ball")})
    with pytest.raises(ValueError, match="must hold the negative prompt's contexts"):
        engine.submit(job)
    assert engine.progress() == []


def test_a_request_that_cannot_be_sampled_is_refused_at_submission(engine: Engine, order: Order) -> None:
    job = order()
    with pytest.raises(ValueError, match="height"):
        engine.submit(
            Job(
                sample_id="x",
                request=job.request.model_copy(update={"height": 65}),
                sample_index=0,
                conditioning=job.conditioning,
            )
        )
    assert engine.progress() == []
