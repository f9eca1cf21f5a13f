"""The model card: everything a client must know about the served checkpoint to form a request that can be
sampled.

It is read once from the app, and holds numbers and names alone. It does not know where the weights are, how
many replicas serve them, or on what.

Invariant: the card describes a checkpoint together with what its operator allows; two cards with one
`checkpoint_digest` may differ in `limits` and `defaults`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.errors import Problem
from schemas.fields import Contract, Count, Positive

MAX_METADATA_BYTES = 4096
"""A request's metadata is copied into the manifest of each of its samples; more belongs in the trainer's own
records."""

StateDtype = Literal["float32", "bfloat16", "float16"]
"""dtypes in which a latent state can be stored and used, by their torch names."""


class Limits(Contract):
    """What one request may ask for at most. Set by the operator; `resolve` refuses what is above."""

    max_num_samples: Count
    """Samples in one group."""
    max_inference_steps: Count
    """Denoising steps of one sample."""
    max_video_tokens: Count
    """Tokens of the packed video latents of one sample."""
    max_audio_tokens: Count
    """Tokens of the packed audio latents of one sample."""
    max_prompt_chars: Count
    """Characters of the prompt, and of the negative prompt."""
    max_metadata_bytes: Annotated[Count, Field(le=MAX_METADATA_BYTES)] = MAX_METADATA_BYTES
    """Bytes of the request's metadata as compact JSON in UTF-8."""
    max_deadline_s: Positive
    """Seconds a request may give itself."""
    state_dtypes: Annotated[tuple[StateDtype, ...], Field(min_length=1)] = ("float32", "bfloat16", "float16")
    """Storage dtypes a request may choose from."""


class Defaults(Contract):
    """What a request gets for the fields it leaves out."""

    height: Count
    """Pixels."""
    width: Count
    """Pixels."""
    num_frames: Count
    """Frames of video."""
    frame_rate: Positive
    """Frames per second."""
    num_inference_steps: Count
    """Denoising steps."""
    deadline_s: Positive
    """Seconds from submission until the sample is given up."""


class ModelCard(Contract):
    """The served checkpoint, its limits and its defaults."""

    checkpoint: str
    """What was asked for: "tiny", a hub id, or a path."""
    checkpoint_digest: str
    """Hex sha256 of the components' config JSONs in sorted order: which architecture this is, not which
    weights."""

    spatial_ratio: Count
    """Pixels per latent pixel, in each direction, of the video VAE (32)."""
    temporal_ratio: Count
    """Frames per latent frame of the video VAE (8)."""
    patch_size: Count
    """Latent pixels per token, in each direction (1)."""
    patch_size_t: Count
    """Latent frames per token (1)."""
    video_channels: Count
    """Channels of one video token: the transformer's in_channels (128)."""

    audio_sample_rate: Count
    """Samples per second of the waveform that the mel spectrogram is made from (16000)."""
    audio_hop_length: Count
    """Those samples per mel frame (160)."""
    audio_temporal_ratio: Count
    """Mel frames per audio latent frame (4)."""
    audio_latent_channels: Count
    """Channels of an audio latent frame (8)."""
    audio_mel_bins: Count
    """Mel bins of the spectrogram (64)."""
    audio_mel_ratio: Count
    """Mel bins per latent mel bin (4); audio token channels = latent channels * mel bins / this."""

    waveform_sample_rate: Count
    """Samples per second of the decoded waveform."""
    waveform_channels: Count
    """Channels of the decoded waveform (2)."""

    num_layers: Count
    """Blocks of the transformer."""
    max_prompt_tokens: Count
    """Tokens a prompt is padded or cut to (1024)."""
    video_context_dim: Count
    """Channels of the text context that the video branch attends to."""
    audio_context_dim: Count
    """Channels of the text context that the audio branch attends to."""
    scheduler: dict[str, Any]
    """The scheduler's config JSON, from which the sigma grid is computed."""

    limits: Limits
    """What a request may ask for."""
    defaults: Defaults
    """What it gets without asking."""

    @property
    def stamp(self) -> dict[str, str]:
        """What orders and the manifests of tables say of the checkpoint that they are of."""
        return {"checkpoint": self.checkpoint, "checkpoint_digest": self.checkpoint_digest}

    def refuse_others(self, stamped: Mapping[str, Any]) -> None:
        """Raises RuntimeError (a Problem) for an order or a manifest of another checkpoint: during a rolling
        update to one, stages of both are there."""
        found = {name: stamped.get(name) for name in self.stamp}
        if found != self.stamp:
            raise Problem(
                code="checkpoint_replaced",
                field="checkpoint",
                value=found["checkpoint"],
                rule=f"this replica serves {self.checkpoint} ({self.checkpoint_digest[:12]}), and the order or its "
                f"tables are of {found['checkpoint']} ({str(found['checkpoint_digest'])[:12]})",
                remedy="connect anew when the update to another checkpoint is done, and submit the group again",
            ).exception()
