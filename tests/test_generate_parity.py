"""``mode: generate`` is diffusers' LTX2Pipeline: the same latents, sound and frames from the same initial latents.

The contexts are those that the pipeline's own connectors gave, since they run on two rows there where guidance is on,
and on any number of rows here; that one prompt's contexts are equal is shown in test_text.py, and again by the last
test here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2Pipeline
from torch import Tensor

from pipeline.checkpoint import folder, load
from pipeline.conditioning import Conditioning, Context
from pipeline.decode import AVDecoder, DecodedMedia
from pipeline.engine import Engine
from pipeline.noise import MODALITIES
from pipeline.sample import Job
from pipeline.velocity import VelocityModel
from schemas.card import ModelCard
from schemas.geometry import Geometry
from tests.engines import sample

OFF: dict[str, Any] = {
    "guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "audio_guidance_rescale": 0.0,
}
CFG = {"guidance_scale": 3.0, "audio_guidance_scale": 7.0}
RESCALE = {"guidance_rescale": 0.7, "audio_guidance_rescale": 0.7}
GUIDERS: dict[str, dict[str, Any]] = {
    "off": OFF,
    "off, rescaled": OFF | RESCALE,
    "cfg": OFF | CFG,
    "cfg, rescaled": OFF | CFG | RESCALE,
    "cfg of audio alone": OFF | {"audio_guidance_scale": 7.0},
    "stg": OFF | {"stg_scale": 1.0, "audio_stg_scale": 0.5},
    "isolation": OFF | {"modality_scale": 3.0, "audio_modality_scale": 2.0},
    "the defaults": {},
}
SIZES = {"height": 64, "width": 96, "num_frames": 9, "frame_rate": 24.0}
NUM_STEPS = 4
NEGATIVE_PROMPT = "blurry, out of tune"


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One run of the pipeline, from where its noise was drawn."""

    initial: dict[str, Tensor]
    """Packed initial latents, [L, C]."""
    conditioning: Conditioning
    """What the connectors gave."""
    latents: dict[str, Tensor]
    """Packed final latents, [L, C]."""
    frames: np.ndarray
    """uint8 [F, H, W, 3]"""
    waveform: np.ndarray
    """[channels, samples]"""


def watch(pipe: LTX2Pipeline, *, prompt: str = "a red ball", seed: int = 3, **options: Any) -> Watched:
    """Run the pipeline and keep what passes by: its draws, its contexts, and the last input of its unpackers.

    Its draws are laid out anew, values unchanged: packing leaves them transposed in memory, where the engine's rows are
    contiguous, and a matrix product in bfloat16 rounds the two differently.
    """
    seen: dict[str, Any] = {}

    def drawn(name: str) -> Any:
        draw = getattr(pipe, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] = draw(*args, **kwargs).contiguous()
            return seen[name]

        return call

    def unpacked(name: str) -> Any:
        unpack = getattr(pipe, name)

        def call(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen[name] = latents
            return unpack(latents, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("prepare_latents", "prepare_audio_latents"):
            patch.setattr(pipe, name, drawn(name))
        for name in ("_unpack_latents", "_denormalize_audio_latents"):
            patch.setattr(pipe, name, unpacked(name))
        hook = pipe.connectors.register_forward_hook(lambda _, __, output: seen.update(connectors=output))
        frames, waveform = pipe(
            prompt,
            num_inference_steps=NUM_STEPS,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
            return_dict=False,
            **SIZES,
            **options,
        )
        hook.remove()
    contexts = [
        Context(video=video, audio=audio, mask=mask.to(torch.int64))
        for video, audio, mask in zip(*seen["connectors"], strict=True)
    ]
    return Watched(
        initial={
            "video": seen["prepare_latents"][0],
            "audio": seen["prepare_audio_latents"][0],
        },
        conditioning=Conditioning(
            positive=contexts[-1], negative=contexts[0] if len(contexts) == 2 else None, digest="watched"
        ),
        latents={
            "video": seen["_unpack_latents"][0],
            "audio": seen["_denormalize_audio_latents"][0],
        },
        frames=(frames[0] * 255).round().astype(np.uint8),
        waveform=waveform[0].float().numpy(),
    )


@pytest.fixture(scope="module")
def decode(card: ModelCard) -> Callable[[dict[str, Tensor], Geometry], DecodedMedia]:
    decoder = AVDecoder(
        load("tiny", "vae"),
        load("tiny", "audio_vae"),
        load("tiny", "vocoder"),
        patch_size=card.patch_size,
        patch_size_t=card.patch_size_t,
        tiling=False,
    )
    return lambda latents, of: decoder.decode(latents["video"], latents["audio"], of)


@pytest.mark.parametrize("guider", GUIDERS.values(), ids=GUIDERS)
def test_generate_is_diffusers_pipeline_bit_for_bit(
    guider: dict[str, Any],
    pipe: LTX2Pipeline,
    model: VelocityModel,
    card: ModelCard,
    order: Callable[..., Job],
    decode: Callable[..., DecodedMedia],
) -> None:
    last_block = card.num_layers - 1
    negative = {"negative_prompt": NEGATIVE_PROMPT} if guider.get("audio_guidance_scale", 7.0) > 1 else {}
    watched = watch(pipe, spatio_temporal_guidance_blocks=[last_block], **guider, **negative)
    job = order(
        mode="generate",
        guider=guider,
        num_inference_steps=NUM_STEPS,
        **SIZES,
        **negative,
        job={"initial": watched.initial, "conditioning": watched.conditioning},
    )
    (finished,) = sample(Engine(model, card, row_buckets=(1, 2)), [job])

    for modality in MODALITIES:
        assert torch.equal(finished.sample.latents[modality], watched.latents[modality]), modality
    media = decode(finished.sample.latents, finished.sample.geometry)
    assert np.array_equal(media.waveform, watched.waveform)
    assert np.array_equal(media.frames, watched.frames)


def test_in_bfloat16_the_latents_are_equal_too(card: ModelCard, order: Callable[..., Job]) -> None:
    pipe = LTX2Pipeline.from_pretrained(folder("tiny"), dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    watched = watch(pipe, spatio_temporal_guidance_blocks=[1], negative_prompt=NEGATIVE_PROMPT)
    job = order(
        mode="generate",
        num_inference_steps=NUM_STEPS,
        **SIZES,
        negative_prompt=NEGATIVE_PROMPT,
        job={"initial": watched.initial, "conditioning": watched.conditioning},
    )
    (finished,) = sample(Engine(VelocityModel(pipe.transformer), card, row_buckets=(1, 2)), [job])
    for modality in MODALITIES:
        assert torch.equal(finished.sample.latents[modality], watched.latents[modality]), modality


def test_the_guiders_terms_all_change_the_picture_and_the_sound(pipe: LTX2Pipeline) -> None:
    """So that their equality with the pipeline means something."""
    runs = [watch(pipe, spatio_temporal_guidance_blocks=[1], **guider) for guider in GUIDERS.values()]
    for modality in MODALITIES:
        finals = [run.latents[modality] for run in runs]
        for i, one in enumerate(finals):
            for j, other in enumerate(finals[:i]):
                rescaled_alone = (i, j) == (1, 0)  # with nothing to scale back, off stays off
                assert rescaled_alone or (one - other).abs().max() > 1e-3, (modality, i, j)


def test_a_rollout_by_ode_is_the_pipeline_without_guidance_to_1e_5(
    pipe: LTX2Pipeline, model: VelocityModel, card: ModelCard, order: Callable[..., Job]
) -> None:
    watched = watch(pipe, **OFF)
    job = order(
        transition={"video": {"kind": "ode"}, "audio": {"kind": "ode"}},
        sigma_shift="tokens",
        num_inference_steps=NUM_STEPS,
        **SIZES,
        job={"initial": watched.initial, "conditioning": watched.conditioning},
    )
    (finished,) = sample(Engine(model, card, row_buckets=(1, 2)), [job])
    for modality in MODALITIES:
        torch.testing.assert_close(
            finished.sample.latents[modality], watched.latents[modality], rtol=0, atol=1e-5
        )
        assert finished.sample.log_probs[modality] == [None] * NUM_STEPS


def test_from_the_prompt_to_the_frames_without_guidance_all_is_equal(
    pipe: LTX2Pipeline,
    model: VelocityModel,
    card: ModelCard,
    order: Callable[..., Job],
    decode: Callable[..., DecodedMedia],
) -> None:
    watched = watch(pipe, prompt="rain on a tin roof", **OFF)
    job = order(
        prompt="rain on a tin roof",
        mode="generate",
        guider=OFF,
        num_inference_steps=NUM_STEPS,
        **SIZES,
        job={"initial": watched.initial},
    )
    (finished,) = sample(Engine(model, card, row_buckets=(1, 2)), [job])
    media = decode(finished.sample.latents, finished.sample.geometry)
    assert np.array_equal(media.frames, watched.frames)
    assert np.array_equal(media.waveform, watched.waveform)
