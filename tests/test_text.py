"""Prompts to contexts, as diffusers' LTX2Pipeline makes them."""

import numpy as np
import pytest
import torch
from diffusers import LTX2Pipeline

from pipeline.checkpoint import load
from pipeline.tensors import owned
from pipeline.text import PromptEncoder
from schemas.card import ModelCard
from schemas.errors import Problem

PROMPTS = ("a red ball", "Two dogs, 猫 and «là» 🎵 sing in the snow", "", "word " * 200)


@torch.no_grad()
def of_diffusers(pipe: LTX2Pipeline, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contexts and mask of the rows, [B, T, D] and [B, T]."""
    embeds, mask, _, _ = pipe.encode_prompt(prompts, do_classifier_free_guidance=False)
    return pipe.connectors(embeds, mask, padding_side=pipe.tokenizer.padding_side)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompts_contexts_are_the_pipelines_bit_for_bit(
    prompt: str, encoder: PromptEncoder, pipe: LTX2Pipeline
) -> None:
    video, audio, mask = of_diffusers(pipe, [prompt])
    (own,) = encoder.encode([prompt], num_rows=1)
    assert np.array_equal(own.video, video[0].numpy())
    assert np.array_equal(own.audio, audio[0].numpy())
    assert np.array_equal(own.mask, mask[0].numpy())
    assert own.torch_dtype == "float32"


def test_so_are_those_of_prompts_that_share_a_forward_pass(
    encoder: PromptEncoder, pipe: LTX2Pipeline
) -> None:
    video, audio, _ = of_diffusers(pipe, list(PROMPTS[:3]))
    for i, own in enumerate(encoder.encode(PROMPTS[:3], num_rows=3)):
        assert np.array_equal(own.video, video[i].numpy())
        assert np.array_equal(own.audio, audio[i].numpy())


def test_so_are_those_of_a_bfloat16_encoder(card: ModelCard) -> None:
    parts = {
        part: load("tiny", part, dtype="bfloat16") for part in ("tokenizer", "text_encoder", "connectors")
    }
    absent = ("scheduler", "vae", "audio_vae", "transformer", "vocoder")
    video, audio, _ = of_diffusers(LTX2Pipeline(**parts, **dict.fromkeys(absent)), ["a red ball"])
    encoder = PromptEncoder(**parts, max_prompt_tokens=card.max_prompt_tokens)
    (own,) = encoder.encode(["a red ball"], num_rows=1)
    assert own.torch_dtype == "bfloat16"
    assert torch.equal(owned(own.video, torch_dtype="bfloat16"), video[0])
    assert torch.equal(owned(own.audio, torch_dtype="bfloat16"), audio[0])


def test_a_prompts_bits_do_not_depend_on_the_other_rows_of_its_pass(encoder: PromptEncoder) -> None:
    (padded,) = encoder.encode(["a red ball"], num_rows=4)
    together = encoder.encode(["a red ball", "two dogs", "", "rain"], num_rows=4)
    assert len(together) == 4
    assert padded.digest == together[0].digest
    assert np.array_equal(padded.video, together[0].video)


def test_white_space_around_a_prompt_changes_nothing(encoder: PromptEncoder) -> None:
    plain, spaced = (encoder.encode([text], num_rows=1)[0] for text in ("a red ball", "  a red ball\n"))
    assert plain.digest == spaced.digest


def test_the_digest_tells_contexts_apart_and_bytes_are_counted(encoder: PromptEncoder) -> None:
    one, other = encoder.encode(["a red ball", "a blue ball"], num_rows=2)
    assert one.digest != other.digest
    tokens, video_dim = one.video.shape
    assert one.num_bytes == tokens * (4 * video_dim + 4 * one.audio.shape[1] + 1)


def test_a_prompt_of_too_many_tokens_is_refused_with_their_number(
    encoder: PromptEncoder, card: ModelCard
) -> None:
    encoder.check("a" * card.max_prompt_tokens)
    with pytest.raises(ValueError) as refused:
        encoder.check("a" * (card.max_prompt_tokens + 7))
    problem = Problem.of(refused.value)
    assert problem is not None
    assert problem.code == "invalid_request" and problem.field == "prompt"
    assert problem.value == f"{card.max_prompt_tokens + 7} tokens"
    assert str(card.max_prompt_tokens) in problem.rule


def test_encoding_leaves_the_global_generator_alone(encoder: PromptEncoder) -> None:
    before = torch.get_rng_state()
    encoder.encode(["a red ball"], num_rows=1)
    assert torch.equal(before, torch.get_rng_state())
