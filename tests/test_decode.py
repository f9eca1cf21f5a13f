"""Final latents to frames and sound. That both equal diffusers' is shown in test_generate_parity.py."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from pipeline.checkpoint import load
from pipeline.decode import AVDecoder
from pipeline.noise import MODALITIES, draw
from pipeline.sample import token_shape
from pipeline.tensors import frozen, to_numpy
from schemas.card import ModelCard
from schemas.geometry import Geometry, geometry


@pytest.fixture(scope="module")
def of(card: ModelCard) -> Geometry:
    return geometry(card, height=64, width=96, num_frames=9, frame_rate=24.0)


@pytest.fixture(scope="module")
def latents(of: Geometry) -> dict[str, Tensor]:
    """Packed latents [L, C] of one sample."""
    return {modality: draw(7, token_shape(of, modality)) for modality in MODALITIES}


def av_decoder(
    card: ModelCard, *, dtype: str = "float32", audio_dtype: str = "float32", tiling: bool = False
) -> AVDecoder:
    return AVDecoder(
        load("tiny", "vae", dtype=dtype),
        load("tiny", "audio_vae", dtype=audio_dtype),
        load("tiny", "vocoder", dtype=audio_dtype),
        patch_size=card.patch_size,
        patch_size_t=card.patch_size_t,
        tiling=tiling,
    )


@pytest.fixture(scope="module")
def decoder(card: ModelCard) -> AVDecoder:
    return av_decoder(card)


def test_media_have_the_size_of_the_geometry_and_the_range_of_their_dtypes(
    decoder: AVDecoder, latents: dict[str, Tensor], of: Geometry, card: ModelCard
) -> None:
    media = decoder.decode(latents["video"], latents["audio"], of)
    assert media.frames.shape == (9, 64, 96, 3) and media.frames.dtype == np.uint8
    assert media.frames.std() > 10
    mel_frames = card.audio_temporal_ratio * of.audio_frames - 3  # causal: the first has no past
    num_samples = mel_frames * card.audio_hop_length * card.waveform_sample_rate // card.audio_sample_rate
    assert media.waveform.shape == (card.waveform_channels, num_samples)
    assert media.waveform.dtype == np.float32 and np.abs(media.waveform).max() <= 1
    assert media.frames.flags.c_contiguous and media.waveform.flags.c_contiguous


def test_latents_are_read_and_not_written(
    decoder: AVDecoder, latents: dict[str, Tensor], of: Geometry
) -> None:
    stored = {modality: frozen(to_numpy(latents[modality])) for modality in MODALITIES}
    one = decoder.decode(stored["video"], stored["audio"], of)
    other = decoder.decode(latents["video"], latents["audio"], of)
    assert np.array_equal(one.frames, other.frames) and np.array_equal(one.waveform, other.waveform)


def test_a_state_stored_in_bfloat16_is_decoded_from_what_was_stored(
    decoder: AVDecoder, latents: dict[str, Tensor], of: Geometry
) -> None:
    rounded = {modality: latents[modality].bfloat16() for modality in MODALITIES}
    one = decoder.decode(rounded["video"], rounded["audio"], of)
    other = decoder.decode(rounded["video"].float(), rounded["audio"].float(), of)
    assert np.array_equal(one.frames, other.frames) and np.array_equal(one.waveform, other.waveform)


def test_the_video_and_audio_decoders_have_dtypes_of_their_own(
    card: ModelCard, decoder: AVDecoder, latents: dict[str, Tensor], of: Geometry
) -> None:
    exact = decoder.decode(latents["video"], latents["audio"], of)
    mixed = av_decoder(card, dtype="bfloat16").decode(latents["video"], latents["audio"], of)
    assert np.array_equal(mixed.waveform, exact.waveform)
    error = np.abs(mixed.frames.astype(int) - exact.frames)
    assert 0 < error.mean() < 5


def test_tiles_of_a_small_picture_are_the_picture(
    card: ModelCard, decoder: AVDecoder, latents: dict[str, Tensor], of: Geometry
) -> None:
    whole = decoder.decode(latents["video"], latents["audio"], of)
    tiled = av_decoder(card, tiling=True).decode(latents["video"], latents["audio"], of)
    assert np.array_equal(tiled.frames, whole.frames)


def test_a_picture_larger_than_a_tile_is_decoded_in_tiles(card: ModelCard) -> None:
    of = geometry(card, height=64, width=576, num_frames=9, frame_rate=24.0)
    latents = {modality: draw(7, token_shape(of, modality)) for modality in MODALITIES}
    whole, tiled = (
        av_decoder(card, tiling=tiling).decode(latents["video"], latents["audio"], of).frames.astype(int)
        for tiling in (False, True)
    )
    assert tiled.shape == whole.shape
    assert 0 < np.abs(tiled - whole).mean() < 5


def test_a_decoder_that_is_conditioned_on_a_timestep_is_asked_for_a_clean_picture(
    decoder: AVDecoder, latents: dict[str, Tensor], of: Geometry
) -> None:
    asked: list[Tensor] = []

    class TimedVae:
        """A video VAE with a timestep, as some checkpoints have; the rest is the tiny one's."""

        config = SimpleNamespace(timestep_conditioning=True, scaling_factor=1.0)

        def __getattr__(self, name: str) -> Any:
            return getattr(decoder.vae, name)

        def decode(self, packed: Tensor, timestep: Tensor, *, return_dict: bool) -> Any:
            asked.append(timestep)
            return decoder.vae.decode(packed, None, return_dict=return_dict)

    timed = AVDecoder(
        TimedVae(), decoder.audio_vae, decoder.vocoder, patch_size=1, patch_size_t=1, tiling=False
    )
    timed.decode(latents["video"], latents["audio"], of)
    assert [timestep.tolist() for timestep in asked] == [[0.0]]
