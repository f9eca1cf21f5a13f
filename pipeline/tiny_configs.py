"""Configurations of the generated LTX-2.3 checkpoints: every component's constructor arguments, by name.

All LTX-2.3 switches and all of its ratios (video VAE 32x in space and 8x in time; audio 16 kHz, hop 160,
4 mel frames or bins to a latent one; vocoder 16 kHz to 48 kHz) are those of the real checkpoint. Only
widths and depths are smaller, and they differ from each other on purpose, so that code which mixes up two
of them fails.

Does not know weights (tiny_weights.py) or files (tiny.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
IMAGE_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
MERGES = (
    *("t h", "th e", "a n", "an d", "i n", "in g", "o n", "e r", "o f", "r e", "a t", "a r", "o r", "e n"),
    *("▁ a", "▁ the", "▁ of", "▁ in", "▁ on", "▁a n"),
)
MAX_PROMPT_TOKENS = 1024

SCHEDULER: Config = {
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
    "time_shift_type": "exponential",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Constructor arguments of every component with weights."""

    transformer: Config
    """LTX2VideoTransformer3DModel."""
    vae: Config
    """AutoencoderKLLTX2Video."""
    audio_vae: Config
    """AutoencoderKLLTX2Audio."""
    vocoder: Config
    """LTX2VocoderWithBWE."""
    connectors: Config
    """LTX2TextConnectors."""
    text_config: Config
    """Gemma3TextConfig, without the vocabulary."""
    vision_config: Config
    """SiglipVisionConfig: present because the class has one; no image is ever encoded."""


def vocabulary() -> dict[str, int]:
    """Token to id of the byte-fallback BPE: Gemma's special tokens at Gemma's ids, bytes, letters, merges."""
    characters = sorted({piece for merge in MERGES for part in merge.split() for piece in part})
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [
        *SPECIAL_TOKENS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *characters,
        *merged,
        *IMAGE_TOKENS,
    ]
    return {token: index for index, token in enumerate(tokens)}


def _recipe(
    *,
    video_channels: int,
    audio_latent_channels: int,
    audio_mel_bins: int,
    video_heads: tuple[int, int],
    audio_heads: tuple[int, int],
    num_layers: int,
    connector_layers: int,
    num_registers: int,
    text_hidden: int,
    text_layers: int,
    vae_channels: int,
    vocoder_channels: int,
    filter_length: int,
    bwe_mel_bins: int,
) -> Recipe:
    """One checkpoint from its widths and depths; `*_heads` are (number, channels of one)."""
    video_dim = video_heads[0] * video_heads[1]
    audio_dim = audio_heads[0] * audio_heads[1]
    audio_channels = audio_latent_channels * audio_mel_bins // 4  # of one packed token
    transformer = {
        "in_channels": video_channels,
        "out_channels": video_channels,
        "num_attention_heads": video_heads[0],
        "attention_head_dim": video_heads[1],
        "cross_attention_dim": video_dim,
        "gated_attn": True,
        "cross_attn_mod": True,
        "audio_in_channels": audio_channels,
        "audio_out_channels": audio_channels,
        "audio_num_attention_heads": audio_heads[0],
        "audio_attention_head_dim": audio_heads[1],
        "audio_cross_attention_dim": audio_dim,
        "audio_gated_attn": True,
        "audio_cross_attn_mod": True,
        "num_layers": num_layers,
        "caption_channels": text_hidden,
        "rope_type": "split",
        "rope_double_precision": True,
        "use_prompt_embeddings": False,
        "perturbed_attn": True,
        "use_prompt_adaln_single": True,
    }
    vae = {
        "latent_channels": video_channels,
        "block_out_channels": (video_channels,) * 4,
        "layers_per_block": (1, 0, 0, 0, 1),
        "decoder_block_out_channels": (vae_channels, vae_channels, vae_channels, 2 * vae_channels),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
        "decoder_spatio_temporal_scaling": (True, True, True, True),
        "decoder_inject_noise": (False,) * 5,
        "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
        "upsample_residual": (False, False, False, False),
        "upsample_factor": (1, 1, 1, 2),
        "decoder_causal": False,
        "decoder_spatial_padding_mode": "zeros",
        "spatial_compression_ratio": 32,
        "temporal_compression_ratio": 8,
    }
    audio_vae = {
        "base_channels": audio_channels,  # latents_mean has as many entries, and is for packed tokens
        "ch_mult": (1, 1, 1),
        "num_res_blocks": 0,
        "latent_channels": audio_latent_channels,
        "mel_bins": audio_mel_bins,
    }
    vocoder = {
        "in_channels": 2 * audio_mel_bins,
        "hidden_channels": vocoder_channels,
        "upsample_kernel_sizes": [11, 8, 8, 4],
        "upsample_factors": [5, 4, 4, 2],
        "resnet_kernel_sizes": [3, 7],
        "resnet_dilations": [[1, 3], [1, 3]],
        "bwe_in_channels": 2 * bwe_mel_bins,
        "bwe_hidden_channels": vocoder_channels,
        "bwe_upsample_kernel_sizes": [12, 11, 8, 4],
        "bwe_upsample_factors": [6, 5, 4, 2],
        "bwe_resnet_kernel_sizes": [3, 7],
        "bwe_resnet_dilations": [[1, 3], [1, 3]],
        "filter_length": filter_length,
        "window_length": filter_length,
        "num_mel_channels": bwe_mel_bins,
    }
    connectors = {
        "caption_channels": text_hidden,
        "text_proj_in_factor": text_layers + 1,
        "video_connector_num_attention_heads": video_heads[0],
        "video_connector_attention_head_dim": video_heads[1],
        "video_connector_num_layers": connector_layers,
        "video_connector_num_learnable_registers": num_registers,
        "video_gated_attn": True,
        "audio_connector_num_attention_heads": audio_heads[0],
        "audio_connector_attention_head_dim": audio_heads[1],
        "audio_connector_num_layers": connector_layers,
        "audio_connector_num_learnable_registers": num_registers,
        "audio_gated_attn": True,
        "rope_type": "split",
        "per_modality_projections": True,
        "video_hidden_dim": video_dim,
        "audio_hidden_dim": audio_dim,
        "proj_bias": True,
    }
    text_config = {
        "hidden_size": text_hidden,
        "intermediate_size": 2 * text_hidden,
        "num_hidden_layers": text_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": text_hidden // 2,
        "query_pre_attn_scalar": text_hidden // 2,
        "max_position_embeddings": 4096,
        "sliding_window": 512,
        "layer_types": ["sliding_attention"] * (text_layers - 1) + ["full_attention"],
    }
    vision_config = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return Recipe(
        transformer=transformer,
        vae=vae,
        audio_vae=audio_vae,
        vocoder=vocoder,
        connectors=connectors,
        text_config=text_config,
        vision_config=vision_config,
    )


RECIPES: Mapping[str, Recipe] = {
    "tiny": _recipe(
        video_channels=16,
        audio_latent_channels=3,
        audio_mel_bins=32,
        video_heads=(2, 16),
        audio_heads=(2, 8),
        num_layers=2,
        connector_layers=1,
        num_registers=8,
        text_hidden=24,
        text_layers=2,
        vae_channels=8,
        vocoder_channels=32,
        filter_length=128,
        bwe_mel_bins=16,
    ),
    "small": _recipe(
        video_channels=64,
        audio_latent_channels=4,
        audio_mel_bins=64,
        video_heads=(4, 64),
        audio_heads=(4, 32),
        num_layers=5,
        connector_layers=2,
        num_registers=128,
        text_hidden=128,
        text_layers=4,
        vae_channels=16,
        vocoder_channels=64,
        filter_length=512,
        bwe_mel_bins=64,
    ),
}
