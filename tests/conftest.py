"""The tiny checkpoint, loaded once, and short ways to order samples of it."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pyarrow as pa
import pytest
import torch
from diffusers import LTX2Pipeline, LTX2VideoTransformer3DModel
from hypothesis import settings

from configs.settings import AppConfig
from pipeline.checkpoint import folder, load, read_card
from pipeline.conditioning import Conditioning, read
from pipeline.entry import Finished
from pipeline.profile import profile_of
from pipeline.record import to_table
from pipeline.sample import Job
from pipeline.text import EncodedPrompt, PromptEncoder
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.conditioning import pack_conditioning
from schemas.resolve import resolve
from schemas.trajectory import TrajectoryView, read_trajectory

# A machine that others share may take as long as it likes.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Operators this small gain nothing from threads, and on a busy machine threads wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


# A helper's assertions tell their values as a test's own do.
pytest.register_assert_rewrite("tests")


@pytest.fixture(scope="session")
def card() -> ModelCard:
    config = AppConfig()
    return read_card(config.model, config.limits, config.defaults)


@pytest.fixture(scope="session")
def transformer() -> LTX2VideoTransformer3DModel:
    return load("tiny", "transformer")


@pytest.fixture(scope="session")
def model(transformer: LTX2VideoTransformer3DModel) -> VelocityModel:
    return VelocityModel(transformer)


@pytest.fixture(scope="session")
def pipe() -> LTX2Pipeline:
    """diffusers' own pipeline over the same checkpoint."""
    loaded = LTX2Pipeline.from_pretrained(folder("tiny"))
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="session")
def encoder(card: ModelCard) -> PromptEncoder:
    parts = {component: load("tiny", component) for component in ("tokenizer", "text_encoder", "connectors")}
    return PromptEncoder(**parts, max_prompt_tokens=card.max_prompt_tokens)


@pytest.fixture(scope="session")
def condition(encoder: PromptEncoder) -> Callable[..., Conditioning]:
    """``condition(prompt, negative_prompt)``: their contexts, by way of a table as in the graph."""

    @cache
    def encoded(prompt: str) -> EncodedPrompt:
        return encoder.encode([prompt], num_rows=1)[0]

    @cache
    def condition(prompt: str, negative_prompt: str | None = None) -> Conditioning:
        positive = encoded(prompt)
        columns: dict[str, Any] = {}
        digest = positive.digest
        if negative_prompt is not None:
            negative = encoded(negative_prompt)
            columns = {
                "negative_video_context": negative.video,
                "negative_audio_context": negative.audio,
                "negative_text_mask": negative.mask,
            }
            digest = f"{digest}-{negative.digest}"
        table = pack_conditioning(
            video_context=positive.video,
            audio_context=positive.audio,
            text_mask=positive.mask,
            **columns,
            torch_dtype=positive.torch_dtype,
            manifest={"digest": digest},
        )
        return read(table, torch.device("cpu"))

    return condition


@pytest.fixture(scope="session")
def order(card: ModelCard, condition: Callable[..., Conditioning]) -> Callable[..., Job]:
    """``order(sample_index, job={...}, **request)``: a job; ``job`` sets further fields of it.

    All states are kept, and the prompt and the seed are the same, where the request does not say otherwise.
    """
    numbers = itertools.count()

    def order(sample_index: int = 0, *, job: Mapping[str, Any] | None = None, **request: Any) -> Job:
        asked = {"prompt": "a red ball", "seed": 5, "return_steps": "all", **request}
        resolved = resolve({"num_samples": sample_index + 1, **asked}, card)
        fields = {
            "sample_id": f"{resolved.request_id}/{sample_index}/{next(numbers)}",
            "conditioning": condition(resolved.prompt, resolved.negative_prompt),
            **(job or {}),
        }
        return Job(request=resolved, sample_index=sample_index, **fields)

    return order


@pytest.fixture(scope="session")
def table(card: ModelCard, transformer: LTX2VideoTransformer3DModel) -> Callable[..., pa.Table]:
    """``table(finished, of=transformer)``: the trajectory table of a sample that ``of`` was the model of."""

    def table(finished: Finished, of: LTX2VideoTransformer3DModel = transformer) -> pa.Table:
        return to_table(finished, card=card, profile=profile_of(of), replica_id="here", timings={})

    return table


@pytest.fixture(scope="session")
def trajectory(table: Callable[..., pa.Table]) -> Callable[..., TrajectoryView]:
    """``trajectory(finished, of=transformer)``: the same, read back."""

    def trajectory(finished: Finished, **of: Any) -> TrajectoryView:
        return read_trajectory(table(finished, **of))

    return trajectory
