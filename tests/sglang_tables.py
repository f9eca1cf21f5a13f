"""A sample's tables with numbers that are told apart, and SGLang's answers as its trainers read them.

The reader is written from the outside: msgpack, the markers, safetensors' bytes with torch, and nothing of this project.
"""

from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import safetensors.torch

from schemas.conditioning import pack_conditioning
from schemas.media import pack_media
from schemas.trajectory import pack_trajectory

SIGMAS = [1.0, 0.9763464331626892, 0.5, 0.1, 0.0]
NUM_STEPS = 4
LOG_PROBS = [-1.25, None, 0.1234567, -3.5]


def as_float32(values: list[float]) -> list[float]:
    return [float(value) for value in np.asarray(values, np.float32)]


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the archive has of one sample."""

    trajectory: pa.Table
    media: dict[str, pa.Table]
    conditioning: pa.Table


def tables(
    sample_index: int = 0,
    *,
    steps: tuple[int, ...] = (0, 1, 2, 3, 4),
    state_dtype: str = "float32",
    context_dtype: str = "float32",
    masked: bool = False,
    guided: bool = False,
    request: dict[str, Any] | None = None,
) -> Tables:
    """Of a sample of 4 steps, of which step 1 moved by ode."""
    rng = np.random.default_rng(sample_index)
    rows = len(steps)

    def bits(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
        values = rng.standard_normal(shape).astype(np.float32)
        return values if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)

    log_probs = [None if value is None else as_float32([value])[0] for value in LOG_PROBS]
    manifest = {
        "seed": 7,
        "sample_index": sample_index,
        "policy_version": 3,
        "weights_digest": "ab" * 16,
        "sigmas": as_float32(SIGMAS),
        "log_probs_video": log_probs,
        "log_probs_audio": [None] * NUM_STEPS,
        "timings": {"encode_s": 1.0, "wait_s": 100.0, "denoise_s": 2.0, "pack_s": 50.0, "decode_s": 4.0},
        "request": {
            "prompt": "a red ball",
            "height": 4,
            "width": 6,
            "num_frames": 9,
            "frame_rate": 24.0,
            "guidance": {"video": 3.0 if guided else 1.0, "audio": 3.0 if guided else 1.0},
            **(request or {}),
        },
    }
    trajectory = pack_trajectory(
        steps=steps,
        sigmas=[manifest["sigmas"][step] for step in steps],
        video_latents=bits(state_dtype, rows, 5, 8),
        audio_latents=bits(state_dtype, rows, 3, 8),
        log_prob_video=[*log_probs, None][-rows:],
        log_prob_audio=[None] * rows,
        state_dtype=state_dtype,
        manifest=manifest,
    )
    frames = rng.integers(0, 256, (9, 4, 6, 3)).astype(np.uint8)
    waveform = rng.standard_normal((2, 100)).astype(np.float32)
    mask = np.array([1, 1, 0 if masked else 1], np.uint8)
    negative = {
        "negative_video_context": bits(context_dtype, 3, 4),
        "negative_audio_context": bits(context_dtype, 3, 2),
        "negative_text_mask": np.ones(3, np.uint8),
    }
    conditioning = pack_conditioning(
        video_context=bits(context_dtype, 3, 4),
        audio_context=bits(context_dtype, 3, 2),
        text_mask=mask,
        **(negative if guided else {}),
        torch_dtype=context_dtype,
        manifest={"prompt": "a red ball", "digest": "d"},
    )
    return Tables(
        trajectory=trajectory,
        media=pack_media(frames, 24.0, waveform, 48000, manifest),
        conditioning=conditioning,
    )


def read_answer(body: bytes) -> Any:
    """The answer as that server's trainers read it: tensors in place of their markers."""

    def unpacked(value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("__tensor__"):
                tensor = safetensors.torch.load(value["data"])["t"]
                assert value["shape"] == list(tensor.shape) and value["dtype"] == str(tensor.dtype)
                return tensor
            return {key: unpacked(item) for key, item in value.items()}
        return [unpacked(item) for item in value] if isinstance(value, list) else value

    return unpacked(msgpack.unpackb(body))
