"""Which samples share a forward pass, and where each of them stands in it."""

import itertools
from collections.abc import Callable

import torch

from pipeline.conditioning import Conditioning
from pipeline.engine import Engine
from pipeline.noise import MODALITIES
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from tests.engines import LARGER, NUM_STEPS, Order, StillTransformer, sample, settle


def test_a_sample_takes_all_its_steps_and_keeps_the_states_that_were_asked_for(
    engine: Engine, order: Order
) -> None:
    (finished,) = sample(engine, [order(return_steps=[0, 3])])
    assert finished.sample.done and len(finished.sample.places) == NUM_STEPS
    assert [state.step for state in finished.sample.kept] == [0, 3, NUM_STEPS]
    assert [len(finished.sample.log_probs[modality]) for modality in MODALITIES] == [NUM_STEPS] * 2


def test_samples_at_different_steps_share_a_pass_each_with_its_own_sigma(
    engine: Engine, still: StillTransformer, order: Order
) -> None:
    older = engine.submit(order(0))
    engine.tick()
    engine.tick()
    younger = engine.submit(order(1))
    engine.tick()
    sigmas = still.batches[-1]["sigma"]
    settle(engine)
    grid = older.result(timeout=0).sample.sigmas
    assert torch.equal(sigmas, torch.stack([grid[2], grid[0]]) * 1000)
    assert younger.result(timeout=0).sample.done


def test_a_batch_is_padded_to_a_bucket_by_repeating_a_row_and_says_where_each_row_stood(
    engine: Engine, still: StillTransformer, order: Order
) -> None:
    finished = sample(engine, [order(k) for k in range(3)])
    assert {len(batch["hidden_states"]) for batch in still.batches} == {4}
    rows = still.batches[0]["hidden_states"]
    assert torch.equal(rows[3], rows[0]) and not torch.equal(rows[2], rows[0])
    for index, one in enumerate(finished):
        assert {(p.positive.num_rows, p.positive.index, p.negative) for p in one.sample.places} == {
            (4, index, None)
        }


def test_guidance_puts_the_negative_rows_first_and_says_where_both_stood(
    engine: Engine, still: StillTransformer, order: Order, condition: Callable[..., Conditioning]
) -> None:
    guided = {"guidance": {"video": 3.0, "audio": 2.0}, "negative_prompt": "blurry"}
    finished = sample(engine, [order(k, **guided) for k in range(2)])
    contexts = condition("a red ball", "blurry")
    assert contexts.negative is not None
    texts = still.batches[0]["encoder_hidden_states"]
    expected = [contexts.negative.video] * 2 + [contexts.positive.video] * 2
    assert torch.equal(texts, torch.stack(expected))
    for k, one in enumerate(finished):
        place = one.sample.places[0]
        assert place.negative is not None
        assert (place.negative.index, place.positive.index) == (k, 2 + k)


def test_a_sample_of_more_rows_than_the_largest_bucket_takes_several_passes(
    still: StillTransformer, card: ModelCard, order: Order
) -> None:
    engine = Engine(VelocityModel(still), card, row_buckets=(1,))
    guided = {"guidance": {"video": 3.0}, "negative_prompt": "blurry"}
    (finished,) = sample(engine, [order(**guided)])
    assert [len(batch["hidden_states"]) for batch in still.batches] == [1] * 2 * NUM_STEPS
    assert all(p.positive.index == 0 and p.negative.index == 0 for p in finished.sample.places)


def test_two_geometries_take_turns_and_neither_starves_under_a_stream_of_the_other(
    engine: Engine, still: StillTransformer, order: Order
) -> None:
    """The oldest sample is always in the next batch, so a rare geometry waits for the older samples at most."""
    stream = [engine.submit(order(0)), engine.submit(order(1))]
    engine.tick()
    rare = engine.submit(order(0, **LARGER))
    for tick in range(2 * NUM_STEPS):
        if tick % 2 == 0:
            stream.append(engine.submit(order(len(stream))))
        if rare.done():
            break
        engine.tick()
    assert rare.done(), "it was overtaken"
    assert not all(future.done() for future in stream)
    settle(engine)
    assert all(future.exception(timeout=0) is None for future in [rare, *stream])
    tokens = [batch["hidden_states"].shape[1] for batch in still.batches]
    turns = [size for size, _ in itertools.groupby(tokens)]
    assert len(turns) == 3 and turns[0] == turns[2] != turns[1]
