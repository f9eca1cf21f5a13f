"""Publications of the tiny transformer's weights, as a trainer makes them."""

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from diffusers import LTX2VideoTransformer3DModel
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

from pipeline.checkpoint import load
from pipeline.weights import StoredTensor, digests_of, specs_of, stored
from schemas.weights import Publication

Published = tuple[Publication, dict[str, StoredTensor]]

ATTENTION = ["to_q", "to_v", "to_out.0"]

loaded = cache(load)


def fresh(dtype: str = "float32", device: str = "cpu") -> LTX2VideoTransformer3DModel:
    """A tiny transformer of one's own, with the checkpoint's weights."""
    return copy.deepcopy(loaded("tiny", "transformer", dtype=dtype)).to(device)


def published(tensors: Mapping[str, Tensor], **fields: Any) -> Published:
    """What a trainer says of these tensors, and their bits, copied."""
    bits = {name: stored(tensor.detach().clone()) for name, tensor in tensors.items()}
    said = {"version": 1, "update": "full", "tensors": specs_of(bits), "digests": digests_of(bits), **fields}
    return Publication(**said), bits


def moved(transformer: LTX2VideoTransformer3DModel, seed: int, scale: float = 0.01) -> dict[str, Tensor]:
    """A state dict near the transformer's own, as after some steps of training."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in transformer.state_dict().items()
    }


def trained_adapter(
    trainer: LTX2VideoTransformer3DModel, config: LoraConfig, seed: int, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Give the trainer's own model an adapter (or keep the one it has), fill it; PEFT's state dict of it."""
    if not getattr(trainer, "peft_config", None):
        trainer.add_adapter(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            if ".lora_" in name:
                if dtype is not None:
                    parameter.data = parameter.data.to(dtype)
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return dict(get_peft_model_state_dict(trainer))


def plain_lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": ATTENTION, **changes})


def lora(trainer: LTX2VideoTransformer3DModel, seed: int = 3, **fields: Any) -> Published:
    """The trainer's adapter as a publication. config, dtype: of the adapter."""
    config, dtype = fields.pop("config", None) or plain_lora(), fields.pop("dtype", None)
    tensors = trained_adapter(trainer, config, seed, dtype)
    return published(tensors, update="lora", lora_config=config.to_dict(), **fields)


def forward(transformer: LTX2VideoTransformer3DModel) -> tuple[Tensor, Tensor]:
    """Velocities of two rows that are always the same: video [2, 12, C], audio [2, 5, C]."""
    config, generator = transformer.config, torch.Generator().manual_seed(1)

    def draw(num_tokens: int, num_channels: int) -> Tensor:
        values = torch.randn(2, num_tokens, num_channels, generator=generator)
        return values.to(transformer.device, transformer.dtype)

    sigma = torch.tensor([900.0, 300.0], device=transformer.device)
    with torch.inference_mode():
        video, audio = transformer(
            hidden_states=draw(12, config.in_channels),
            audio_hidden_states=draw(5, config.audio_in_channels),
            encoder_hidden_states=draw(7, config.cross_attention_dim),
            audio_encoder_hidden_states=draw(7, config.audio_cross_attention_dim),
            timestep=sigma,
            sigma=sigma,
            num_frames=2,
            height=2,
            width=3,
            fps=24.0,
            audio_num_frames=5,
            use_cross_timestep=True,
            return_dict=False,
        )
    return video, audio
