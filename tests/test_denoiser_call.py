"""The denoiser's class without a cluster: a call that is cancelled at any moment leaves no sample in the engine, and what
is of another checkpoint no stage takes."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pytest

from configs.settings import AppConfig
from deployments.av_decoder import AVDecoder
from deployments.denoiser import Denoiser
from pipeline.text import PromptEncoder
from schemas.arrow import manifest_of
from schemas.card import ModelCard
from schemas.conditioning import pack_conditioning
from schemas.errors import Problem
from schemas.order import SampleOrder
from schemas.resolve import resolve
from schemas.resolved import ResolvedRequest
from tests.sources import LocalSource


class NoBoard:
    """A lease board that never answers: leases are then taken to stand."""

    def __getattr__(self, _: str) -> Any:
        raise RuntimeError("no answer")


@pytest.fixture(scope="module")
def denoiser(card: ModelCard) -> Iterator[Denoiser]:
    source = LocalSource()
    running = Denoiser(AppConfig(denoiser={"row_buckets": [1]}), card, NoBoard(), lambda *_: source)
    yield running
    running.__del__()  # ends its threads, as Serve does


@pytest.fixture(scope="module")
def conditioning(encoder: PromptEncoder, card: ModelCard) -> pa.Table:
    (encoded,) = encoder.encode(["a red ball"], num_rows=1)
    return pack_conditioning(
        video_context=encoded.video,
        audio_context=encoded.audio,
        text_mask=encoded.mask,
        torch_dtype=encoded.torch_dtype,
        manifest={**card.stamp, "digest": encoded.digest},
    )


def order_of(
    request: ResolvedRequest, card: ModelCard, sample_id: str, *, sample_index: int = 0
) -> dict[str, Any]:
    order = SampleOrder(
        **card.stamp,
        sample_id=sample_id,
        request=request,
        sample_index=sample_index,
        attempt=1,
        lease_id="mine",
        seconds_left=60.0,
        encode_s=0.0,
    )
    return order.model_dump(mode="json")


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 20, 200])
def test_a_cancelled_call_has_left_the_engine_when_it_ends(
    denoiser: Denoiser, conditioning: pa.Table, turns: int
) -> None:
    request = resolve({"prompt": "a red ball", "num_inference_steps": 100, "num_samples": 4}, denoiser.card)

    async def test() -> None:
        calls = []
        for index in range(4):
            order = order_of(request, denoiser.card, f"sample/{turns}/{index}", sample_index=index)
            calls.append(asyncio.ensure_future(denoiser(conditioning, order)))
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert all(call.cancelled() for call in calls)
        while denoiser.engine.progress():  # the engine's thread is about to let go
            await asyncio.sleep(0.001)

    before = asdict(denoiser.engine.stats)
    asyncio.run(test())
    after = asdict(denoiser.engine.stats)
    assert after["cancelled"] - before["cancelled"] == 4 and after["done"] == before["done"]


def test_a_sample_that_was_being_packed_when_its_weights_turned_out_wrong_does_not_go_out(
    denoiser: Denoiser, conditioning: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = resolve({"prompt": "a red ball", "num_inference_steps": 2, "num_samples": 1}, denoiser.card)
    order = order_of(request, denoiser.card, "packed")
    pack, noted = denoiser._pack, []

    def packing(*arguments: Any) -> pa.Table:
        noted.extend(denoiser.follower._finished)
        denoiser.follower.fatal = Problem(code="internal", rule="the weights are others")
        return pack(*arguments)

    monkeypatch.setattr(denoiser, "_pack", packing)
    try:
        with pytest.raises(RuntimeError, match="replica_died"):
            asyncio.run(denoiser(conditioning, order))
    finally:
        denoiser.follower.fatal = None
    assert (0, "packed") in noted, "before it was packed"


@pytest.mark.parametrize("field", ["checkpoint", "checkpoint_digest"])
def test_no_stage_takes_what_is_of_another_checkpoint(
    denoiser: Denoiser, conditioning: pa.Table, field: str
) -> None:
    card = denoiser.card
    request = resolve({"prompt": "a red ball", "num_inference_steps": 2, "num_samples": 1}, card)
    order = order_of(request, card, f"of another {field}")
    trajectory = asyncio.run(denoiser(conditioning, order))

    def of_another(table: pa.Table) -> pa.Table:
        manifest = json.dumps({**manifest_of(table), field: "another"})
        return table.replace_schema_metadata({**table.schema.metadata, b"manifest": manifest})

    decoder = AVDecoder(AppConfig(), card)
    assert asyncio.run(decoder(trajectory))["video"].num_rows > 0
    for calling in (
        lambda: denoiser(conditioning, {**order, field: "another"}),
        lambda: denoiser(of_another(conditioning), order),
        lambda: denoiser(conditioning, order, of_another(trajectory)),
        lambda: decoder(of_another(trajectory)),
    ):
        with pytest.raises(RuntimeError) as refused:
            asyncio.run(calling())
        problem = Problem.of(refused.value)
        assert problem is not None and (problem.code, problem.field) == ("checkpoint_replaced", "checkpoint")


def test_health_is_the_engines_heartbeat(denoiser: Denoiser) -> None:
    denoiser.check_health()
    denoiser._stall_timeout_s = -1.0
    with pytest.raises(RuntimeError, match="stall_timeout_s"):
        denoiser.check_health()


def test_a_halted_denoiser_refuses_at_once_where_it_should(
    denoiser: Denoiser, conditioning: pa.Table
) -> None:
    denoiser.engine.halt()
    refusing = denoiser._settings.model_copy(update={"when_halted": "refuse"})
    waiting, denoiser._settings = denoiser._settings, refusing
    try:
        with pytest.raises(RuntimeError, match='"code": "halted"'):
            asyncio.run(denoiser(conditioning, {}))
    finally:
        denoiser._settings = waiting
        denoiser.engine.resume()
