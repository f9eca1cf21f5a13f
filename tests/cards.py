"""The model card of LTX-2.3, as tests change it."""

from typing import Any

from schemas.card import ModelCard


def ltx23_card(**changes: Any) -> ModelCard:
    """LTX-2.3's numbers, small defaults. `limits` and `defaults` are changed key by key, the rest as a whole."""
    limits = {
        "max_num_samples": 64,
        "max_inference_steps": 100,
        "max_video_tokens": 8192,
        "max_audio_tokens": 512,
        "max_prompt_chars": 1000,
        "max_deadline_s": 3600,
    }
    defaults = {
        "height": 64,
        "width": 96,
        "num_frames": 9,
        "frame_rate": 24,
        "num_inference_steps": 6,
        "deadline_s": 600,
    }
    numbers: dict[str, Any] = {
        "checkpoint": "ltx23",
        "checkpoint_digest": "0" * 64,
        "spatial_ratio": 32,
        "temporal_ratio": 8,
        "patch_size": 1,
        "patch_size_t": 1,
        "video_channels": 128,
        "audio_sample_rate": 16000,
        "audio_hop_length": 160,
        "audio_temporal_ratio": 4,
        "audio_latent_channels": 8,
        "audio_mel_bins": 64,
        "audio_mel_ratio": 4,
        "waveform_sample_rate": 48000,
        "waveform_channels": 2,
        "num_layers": 48,
        "max_prompt_tokens": 1024,
        "video_context_dim": 4096,
        "audio_context_dim": 2048,
        "scheduler": {"use_dynamic_shifting": True, "shift_terminal": 0.1},
    }
    limits |= changes.pop("limits", {})
    defaults |= changes.pop("defaults", {})
    return ModelCard(**numbers | {"limits": limits, "defaults": defaults} | changes)
