"""The transformer's forward pass over rows: latents and contexts in, velocities out.

Sampling and replay both come through here, so that they feed the model alike. It knows no schedule and no guidance:
rows of one batch may be at different steps, each with its own sigma.

A row's bits depend on its place, the number of rows of its batch and its index among them, and not on what the other
rows hold (measured on the CPU, where vectorised loops end in scalar ones). So the place of every row is recorded, and
whoever wants the same bits again puts it into the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from diffusers import LTX2VideoTransformer3DModel
from torch import Tensor

from pipeline.conditioning import Context
from pipeline.noise import Modality
from schemas.geometry import Geometry

TIMESTEPS_PER_SIGMA = 1000
"""The transformer takes sigma on the scale of its training timesteps."""

Latents = dict[Modality, Tensor]
"""One tensor per modality: packed latents or velocities, [L, C] of a row or [B, L, C] of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a forward pass."""

    latents: Latents
    """Current state per modality, [L, C]."""
    sigma: Tensor
    """Noise level of both modalities, float32 scalar."""
    context: Context


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a row stood in its forward pass."""

    num_rows: int
    """Rows of the pass, padding included."""
    index: int
    """The row's index among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbation:
    """How a forward pass departs from the plain one (LTX-2.3's guider compares such passes with it)."""

    isolate_modalities: bool = False
    """Cut the attention between video and audio."""
    skip_attention_blocks: tuple[int, ...] = ()
    """Blocks whose self-attention passes its values through (spatio-temporal guidance)."""


PLAIN = Perturbation()


class VelocityModel:
    """A loaded LTX-2 transformer as a function of rows.

    Calls run in the caller's gradient mode: the engine enters ``inference_mode``, replay does not.
    """

    def __init__(self, transformer: LTX2VideoTransformer3DModel) -> None:
        self.transformer = transformer
        self._coordinates = lru_cache(maxsize=32)(self._make_coordinates)

    @property
    def device(self) -> torch.device:
        return torch.device(self.transformer.device)

    def __call__(
        self, batch: Sequence[Row], geometry: Geometry, perturbation: Perturbation = PLAIN
    ) -> Latents:
        """Velocities of the rows, float32 [len(batch), L, C] per modality."""
        dtype, device = self.transformer.dtype, self.device
        timestep = torch.stack([row.sigma for row in batch]).to(device) * TIMESTEPS_PER_SIGMA
        mask = _stacked_masks(batch)
        video_coords, audio_coords = self._coordinates(geometry, len(batch))
        video, audio = self.transformer(
            hidden_states=torch.stack([row.latents["video"] for row in batch]).to(dtype),
            audio_hidden_states=torch.stack([row.latents["audio"] for row in batch]).to(dtype),
            encoder_hidden_states=torch.stack([row.context.video for row in batch]).to(dtype),
            audio_encoder_hidden_states=torch.stack([row.context.audio for row in batch]).to(dtype),
            timestep=timestep,
            sigma=timestep,
            encoder_attention_mask=mask,
            audio_encoder_attention_mask=mask,
            num_frames=geometry.latent_frames,
            height=geometry.latent_height,
            width=geometry.latent_width,
            fps=geometry.frame_rate,
            audio_num_frames=geometry.audio_frames,
            video_coords=video_coords,
            audio_coords=audio_coords,
            isolate_modalities=perturbation.isolate_modalities,
            spatio_temporal_guidance_blocks=list(perturbation.skip_attention_blocks) or None,
            use_cross_timestep=True,
            return_dict=False,
        )
        return {"video": video.float(), "audio": audio.float()}

    def _make_coordinates(self, geometry: Geometry, num_rows: int) -> tuple[Tensor, Tensor]:
        """Positions of the tokens, made once per geometry and number of rows."""
        video = self.transformer.rope.prepare_video_coords(
            num_rows,
            geometry.latent_frames,
            geometry.latent_height,
            geometry.latent_width,
            self.device,
            fps=geometry.frame_rate,
        )
        audio = self.transformer.audio_rope.prepare_audio_coords(num_rows, geometry.audio_frames, self.device)
        return video, audio


def _stacked_masks(batch: Sequence[Row]) -> Tensor | None:
    """Text masks of the rows, int64 [B, T]; None when every row attends to all its tokens."""
    if all(row.context.mask is None for row in batch):
        return None
    whole = torch.ones(len(batch[0].context.video), dtype=torch.int64, device=batch[0].context.video.device)
    return torch.stack([whole if row.context.mask is None else row.context.mask for row in batch])
