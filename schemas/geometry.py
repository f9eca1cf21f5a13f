"""From pixels, frames and seconds to tokens.

All ratios come from the card; nothing here is a fact about one checkpoint. Audio length is not asked for: it
follows from the length of the video, by the formula of diffusers' `LTX2Pipeline`, so that both decode to the
same seconds.

This module knows nothing of tensors, nor of how many samples there are.

Invariant: a `Geometry` made by `geometry` has whole tokens, at least one of each modality, within the card's
limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from schemas.card import ModelCard
from schemas.errors import Problem, invalid


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Sizes of one sample, from pixels down to tokens."""

    height: int
    """Pixels."""
    width: int
    """Pixels."""
    num_frames: int
    """Frames of video."""
    frame_rate: float
    """Frames per second."""
    latent_frames: int
    """(num_frames - 1) // temporal_ratio + 1: the first frame has a latent frame of its own."""
    latent_height: int
    """height / spatial_ratio."""
    latent_width: int
    """width / spatial_ratio."""
    num_video_tokens: int
    """L_v: tokens of the packed video latents."""
    video_channels: int
    """Channels per video token."""
    audio_frames: int
    """L_a: audio latent frames, a token each."""
    audio_latent_channels: int
    """Channels of an audio latent frame."""
    audio_mel_bins: int
    """Mel bins of an audio latent frame (not of the spectrogram)."""
    audio_channels: int
    """Channels per audio token: audio_latent_channels * audio_mel_bins."""


def geometry(card: ModelCard, *, height: int, width: int, num_frames: int, frame_rate: float) -> Geometry:
    """The sizes of a sample of `num_frames` frames of `height` x `width` pixels at `frame_rate` frames per
    second.

    Raises ValueError (a Problem that names the field and the nearest right values) for a side that is not a
    whole number of tokens, a number of frames that is not a whole number of latent frames and one (8k + 1), a
    video too short for one audio token, and for more tokens than the card's limits allow.
    """
    _check_side(card, "height", height)
    _check_side(card, "width", width)
    _check_num_frames(card, num_frames)
    if not (math.isfinite(frame_rate) and frame_rate > 0):
        raise invalid("frame_rate", frame_rate, "must be finite and greater than 0").exception()

    latent_frames = (num_frames - 1) // card.temporal_ratio + 1
    latent_height, latent_width = height // card.spatial_ratio, width // card.spatial_ratio
    tokens_per_frame = (latent_height // card.patch_size) * (latent_width // card.patch_size)
    num_video_tokens = (latent_frames // card.patch_size_t) * tokens_per_frame
    if num_video_tokens > card.limits.max_video_tokens:
        raise _too_many_video_tokens(card, num_frames, tokens_per_frame, num_video_tokens).exception()

    audio_frames = _audio_frames(card, num_frames, frame_rate)
    if audio_frames < 1:
        raise _too_short_for_audio(card, num_frames, frame_rate).exception()
    if audio_frames > card.limits.max_audio_tokens:
        raise _too_many_audio_tokens(card, num_frames, frame_rate).exception()

    audio_mel_bins = card.audio_mel_bins // card.audio_mel_ratio
    return Geometry(
        height=height,
        width=width,
        num_frames=num_frames,
        frame_rate=frame_rate,
        latent_frames=latent_frames,
        latent_height=latent_height,
        latent_width=latent_width,
        num_video_tokens=num_video_tokens,
        video_channels=card.video_channels,
        audio_frames=audio_frames,
        audio_latent_channels=card.audio_latent_channels,
        audio_mel_bins=audio_mel_bins,
        audio_channels=card.audio_latent_channels * audio_mel_bins,
    )


def _check_side(card: ModelCard, field: str, pixels: int) -> None:
    multiple = card.spatial_ratio * card.patch_size
    if pixels < 1 or pixels % multiple:
        near = _nearest(pixels, step=multiple, first=multiple)
        raise invalid(field, pixels, f"must be a multiple of {multiple}", near).exception()


def _check_num_frames(card: ModelCard, num_frames: int) -> None:
    step, first = _frame_grid(card)
    if num_frames < first or (num_frames - first) % step:
        near = _nearest(num_frames, step=step, first=first)
        raise invalid("num_frames", num_frames, f"must be {step}k + {first}", near).exception()


def _frame_grid(card: ModelCard) -> tuple[int, int]:
    """Right numbers of frames are step * k + first, k >= 0: those whose latent frames fill whole tokens."""
    return card.temporal_ratio * card.patch_size_t, card.temporal_ratio * (card.patch_size_t - 1) + 1


def _nearest(value: int, *, step: int, first: int) -> str:
    if value <= first:
        return f"use {first}"
    below = first + (value - first) // step * step
    return f"use {below} or {below + step}"


def _audio_frames(card: ModelCard, num_frames: int, frame_rate: float) -> int:
    """As diffusers' LTX2Pipeline: seconds * latent frames per second, rounded half to even.

    A length past any limit is cut to one more than the limit, since it may be past the integers of a float
    too.
    """
    exact = num_frames / frame_rate * _audio_frames_per_s(card)
    return round(min(exact, card.limits.max_audio_tokens + 1.0))


def _audio_frames_per_s(card: ModelCard) -> float:
    return card.audio_sample_rate / card.audio_hop_length / float(card.audio_temporal_ratio)


def _too_many_video_tokens(card: ModelCard, num_frames: int, tokens_per_frame: int, tokens: int) -> Problem:
    limit = card.limits.max_video_tokens
    step, first = _frame_grid(card)
    rule = f"must give at most {limit} video tokens, but gives {tokens} at this height and width"
    fitting = limit // tokens_per_frame
    if fitting < 1:
        return invalid("num_frames", num_frames, rule, "use a smaller height or width")
    longest = first + (fitting - 1) * step
    return invalid("num_frames", num_frames, rule, f"use at most {longest}, or a smaller height or width")


def _too_short_for_audio(card: ModelCard, num_frames: int, frame_rate: float) -> Problem:
    """One audio token needs more than half a latent frame's time (a half rounds to even, to 0)."""
    step, first = _frame_grid(card)
    shortest = 0.5 * frame_rate / _audio_frames_per_s(card)
    enough = first + max(0, math.ceil((shortest - first) / step)) * step
    if _audio_frames(card, enough, frame_rate) < 1:
        enough += step
    rule = f"must last for one audio token, but is too short at {frame_rate:g} frames per second"
    return invalid("num_frames", num_frames, rule, f"use at least {enough}, or a lower frame_rate")


def _too_many_audio_tokens(card: ModelCard, num_frames: int, frame_rate: float) -> Problem:
    limit = card.limits.max_audio_tokens
    step, first = _frame_grid(card)
    longest = (
        first + math.floor(((limit + 0.5) * frame_rate / _audio_frames_per_s(card) - first) / step) * step
    )
    if _audio_frames(card, longest, frame_rate) > limit:
        longest -= step
    rule = (
        f"must last for at most {limit} audio tokens, but lasts for more at {frame_rate:g} frames per second"
    )
    remedy = (
        "use a higher frame_rate" if longest < first else f"use at most {longest}, or a higher frame_rate"
    )
    return invalid("num_frames", num_frames, rule, remedy)
