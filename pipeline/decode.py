"""Final latents to media: video VAE to uint8 frames; audio VAE and vocoder to a float32 waveform.

Unpacking and denormalising are those of diffusers' LTX2Pipeline, whose frames and sound it reproduces.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2Pipeline
from numpy.typing import NDArray
from torch import Tensor

from schemas.geometry import Geometry


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedMedia:
    """What a person would watch."""

    frames: NDArray[np.uint8]
    """[num_frames, height, width, 3]"""
    waveform: NDArray[np.float32]
    """[channels, samples], in [-1, 1]"""


class AVDecoder:
    """Both decoders of one checkpoint, each on the device and in the dtype it was loaded with."""

    def __init__(
        self,
        vae: AutoencoderKLLTX2Video,
        audio_vae: AutoencoderKLLTX2Audio,
        vocoder: Any,
        *,
        patch_size: int,
        patch_size_t: int,
        tiling: bool,
    ) -> None:
        self.vae, self.audio_vae, self.vocoder = vae, audio_vae, vocoder
        self._patches = (patch_size, patch_size_t)
        if tiling:
            vae.enable_tiling()

    @torch.inference_mode()
    def decode(self, video_latents: Tensor, audio_latents: Tensor, geometry: Geometry) -> DecodedMedia:
        """Media of one sample from its packed, normalised latents [L, C] of either modality."""
        return DecodedMedia(
            frames=self._frames(video_latents, geometry), waveform=self._waveform(audio_latents, geometry)
        )

    def _frames(self, packed: Tensor, geometry: Geometry) -> NDArray[np.uint8]:
        vae = self.vae
        latents = LTX2Pipeline._unpack_latents(
            packed.float().unsqueeze(0).to(vae.device),
            geometry.latent_frames,
            geometry.latent_height,
            geometry.latent_width,
            *self._patches,
        )
        latents = LTX2Pipeline._denormalize_latents(
            latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        )
        # A decoder that is conditioned on a timestep is asked for a clean picture: time 0, no noise added.
        timestep = (
            torch.zeros(1, device=vae.device, dtype=vae.dtype) if vae.config.timestep_conditioning else None
        )
        video = vae.decode(latents.to(vae.dtype), timestep, return_dict=False)[0]
        pixels = (video[0].float() / 2 + 0.5).clamp(0, 1).permute(1, 2, 3, 0)
        frames: NDArray[np.uint8] = (pixels * 255).round().to(torch.uint8).cpu().numpy()
        return np.ascontiguousarray(frames)

    def _waveform(self, packed: Tensor, geometry: Geometry) -> NDArray[np.float32]:
        vae = self.audio_vae
        latents = LTX2Pipeline._denormalize_audio_latents(
            packed.float().unsqueeze(0).to(vae.device), vae.latents_mean, vae.latents_std
        )
        latents = LTX2Pipeline._unpack_audio_latents(
            latents, geometry.audio_frames, num_mel_bins=geometry.audio_mel_bins
        )
        mel = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        waveform: NDArray[np.float32] = self.vocoder(mel.to(self.vocoder.dtype))[0].float().cpu().numpy()
        return np.ascontiguousarray(waveform)
