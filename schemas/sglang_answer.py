"""A sample of ours as an element of SGLang's `POST /rollout/generate` answer.

Fields and shapes are that server's, without the batch dimension, which it takes off too. T steps, K kept states, S
video tokens, S_a audio tokens, C channels, L text tokens, D context channels.

Added: `sample_index`, `request`, `policy_version`, `weights_digest`, `audio`, `audio_sample_rate`, `audio_log_probs`,
`kept_step_indices`; in `dit_trajectory`, `audio_latents`; in `denoising_env`, the audio branch's contexts and the numbers
that a forward pass needs.

This module does not know where the tables come from.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.arrow import Array
from schemas.conditioning import ConditioningView, read_conditioning
from schemas.media import MediaView, read_media
from schemas.sglang import SGLangRequest
from schemas.sglang_wire import WireTensor, tensor
from schemas.trajectory import TrajectoryView, read_trajectory


def answer_of(
    asked: SGLangRequest,
    *,
    request_id: str,
    media: Mapping[str, pa.Table],
    trajectory: pa.Table | None,
    conditioning: pa.Table | None,
) -> dict[str, Any]:
    """One sample's answer, with tensors as `WireTensor`. The tables are read where they are, and must stay."""
    pictures = read_media(media)
    known = pictures.manifest
    states = None if trajectory is None else read_trajectory(trajectory)
    contexts = None if conditioning is None else read_conditioning(conditioning)
    kept = None if states is None else _kept(asked, states)
    seconds = known["timings"]
    return {
        "request_id": request_id,
        "prompt": asked.prompt,
        "seed": known["seed"],
        "generated_output": _zero_to_one(pictures),
        "rollout_log_probs": _log_probs(known["log_probs_video"]) if asked.rollout else None,
        "rollout_debug_tensors": None,
        "denoising_env": _environment(contexts, known["request"])
        if contexts is not None and asked.rollout_return_denoising_env
        else None,
        "dit_trajectory": _trajectory(states, kept) if states is not None and kept is not None else None,
        "inference_time_s": sum(seconds.get(part, 0.0) for part in ("encode_s", "denoise_s", "decode_s")),
        "peak_memory_mb": None,
        "sample_index": known["sample_index"],
        "request": known["request"],
        "policy_version": known["policy_version"],
        "weights_digest": known["weights_digest"],
        "audio": tensor(pictures.waveform),
        "audio_sample_rate": pictures.sample_rate,
        "audio_log_probs": _log_probs(known["log_probs_audio"]) if asked.rollout else None,
        "kept_step_indices": None if states is None or kept is None else states.steps[kept].tolist(),
    }


def _kept(asked: SGLangRequest, states: TrajectoryView) -> Array:
    """Rows of the states that were asked for: the last one is always there, and may not have been."""
    indices = asked.rollout_return_step_indices
    if indices is None:
        return np.arange(len(states.steps))
    return np.flatnonzero(np.isin(states.steps, indices))


def _zero_to_one(pictures: MediaView) -> WireTensor:
    """float32 [F, H, W, 3], made frame by frame as it is written."""

    def frames() -> Iterator[Array]:
        for frame in pictures.frames:
            yield frame.astype(np.float32) / np.float32(255)

    return WireTensor(dtype="float32", shape=pictures.frames.shape, parts=frames)


def _log_probs(of_every_step: list[float | None]) -> WireTensor:
    """float32 [T], 0 where the modality moved by ode."""
    return tensor(np.array([0.0 if value is None else value for value in of_every_step], np.float32))


def _trajectory(states: TrajectoryView, kept: Array) -> dict[str, Any]:
    return {
        "latents": _rows(states.video_latents, kept, states.state_dtype),
        "timesteps": tensor(states.sigmas[kept] * np.float32(1000)),
        "sigmas": tensor(np.array(states.manifest["sigmas"], np.float32)),
        "audio_latents": _rows(states.audio_latents, kept, states.state_dtype),
    }


def _rows(latents: Array, kept: Array, dtype: str) -> WireTensor:
    """[K, S, C] of [R, S, C], copied nowhere as a whole."""
    return WireTensor(
        dtype=dtype, shape=(len(kept), *latents.shape[1:]), parts=lambda: (latents[row] for row in kept)
    )


def _environment(contexts: ConditioningView, request: Mapping[str, Any]) -> dict[str, Any]:
    """What the transformer was called with besides the state: its keyword arguments, as diffusers names them."""
    negative = None
    if contexts.negative_video_context is not None:
        negative = (
            contexts.negative_video_context,
            contexts.negative_audio_context,
            contexts.negative_text_mask,
        )
    masks = [contexts.text_mask, *([] if negative is None else [negative[2]])]
    masked = not all(mask is None or mask.all() for mask in masks)

    def arguments(video: Array, audio: Array | None, mask: Array | None) -> dict[str, Any]:
        assert audio is not None and mask is not None
        shown = tensor(mask.astype(np.int64)) if masked else None
        return {
            "encoder_hidden_states": tensor(video, contexts.torch_dtype),
            "encoder_attention_mask": shown,
            "encoder_hidden_states_mask": None,
            "encoder_hidden_states_2": None,
            "audio_encoder_hidden_states": tensor(audio, contexts.torch_dtype),
            "audio_encoder_attention_mask": shown,
        }

    return {
        "image_kwargs": {"encoder_hidden_states_image": None},
        "pos_cond_kwargs": arguments(contexts.video_context, contexts.audio_context, contexts.text_mask),
        "neg_cond_kwargs": None if negative is None else arguments(*negative),
        "guidance": None,
        "guidance_scale": request["guidance"]["video"],
        "height": request["height"],
        "width": request["width"],
        "num_frames": request["num_frames"],
        "fps": request["frame_rate"],
    }
