"""The `compile` setting: the transformer's repeated blocks are compiled whole, once per size of a batch and geometry.

The backend of most tests is aot_eager, which traces as the default one does and needs no compiler to run what it traced.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from torch._dynamo.utils import counters

from configs.settings import AppConfig
from deployments.denoiser import Denoiser
from pipeline.checkpoint import load
from pipeline.engine import Engine
from pipeline.noise import MODALITIES
from pipeline.profile import profile_of
from pipeline.sample import Job
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from tests.engines import sample
from tests.sources import LocalSource

Order = Callable[..., Job]

LARGER = {"height": 96, "width": 96, "num_frames": 17}


@pytest.fixture(scope="module")
def compiled() -> Iterator[LTX2VideoTransformer3DModel]:
    """Compiled as the denoiser does it."""
    torch._dynamo.reset()
    transformer = load("tiny", "transformer")
    transformer.compile_repeated_blocks(fullgraph=True, dynamic=False, backend="aot_eager")
    yield transformer
    torch._dynamo.reset()


def num_graphs() -> int:
    """Graphs that were compiled in this process so far."""
    return int(counters["stats"]["unique_graphs"])


def engine_of(transformer: LTX2VideoTransformer3DModel, card: ModelCard, num_rows: int) -> Engine:
    return Engine(VelocityModel(transformer), card, row_buckets=(num_rows,))


def test_a_compiled_transformer_samples_the_bits_of_an_uncompiled_one(
    compiled: LTX2VideoTransformer3DModel,
    transformer: LTX2VideoTransformer3DModel,
    card: ModelCard,
    order: Order,
) -> None:
    def samples(of: LTX2VideoTransformer3DModel) -> list[Any]:
        jobs = [order(0, num_inference_steps=4), order(1, num_inference_steps=6)]
        return [finished.sample for finished in sample(engine_of(of, card, 2), jobs)]

    for one, other in zip(samples(compiled), samples(transformer), strict=True):
        assert one.places == other.places
        for modality in MODALITIES:
            assert torch.equal(one.stacked[modality], other.stacked[modality])
            assert one.log_probs[modality] == other.log_probs[modality]


def test_a_size_and_geometry_are_compiled_once_whatever_steps_and_sigmas_come(
    compiled: LTX2VideoTransformer3DModel, card: ModelCard, order: Order
) -> None:
    engine = engine_of(compiled, card, 1)
    sample(engine, [order(num_inference_steps=2)])
    before = num_graphs()
    sample(engine, [order(num_inference_steps=5, seed=7, prompt="a river in the rain")])
    sample(engine, [order(sigmas=[0.9, 0.6, 0.2])])
    sample(engine, [order(stochastic_steps=[0], state_dtype="bfloat16")])
    assert num_graphs() == before

    sample(engine, [order(num_inference_steps=2, **LARGER)])
    assert num_graphs() == before + 1, "one graph serves all blocks"
    sample(engine, [order(num_inference_steps=3, **LARGER), order(num_inference_steps=2)])
    assert num_graphs() == before + 1


def test_the_profile_says_so(
    compiled: LTX2VideoTransformer3DModel, transformer: LTX2VideoTransformer3DModel
) -> None:
    assert profile_of(compiled).differences(profile_of(transformer).as_dict()) == {"compiled": (True, False)}


@pytest.mark.parametrize("compile_it", [False, True])
def test_the_denoiser_compiles_where_the_setting_says_so(card: ModelCard, compile_it: bool) -> None:
    config = AppConfig(denoiser={"row_buckets": [1], "compile": compile_it})
    with torch.compiler.set_stance("force_eager"):  # the wiring alone: what is compiled is not run
        denoiser = Denoiser(config, card, None, lambda *_: LocalSource())
    try:
        assert profile_of(denoiser.model.transformer).compiled == compile_it
    finally:
        denoiser.__del__()  # ends its threads, as Serve does
