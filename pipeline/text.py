"""Prompts to contexts: Gemma's hidden states of every layer, then the connectors.

The connectors run here and not with the transformer: before them a prompt is some thirty times larger. It knows no
cache and no concurrency. A prompt's bits depend on the number of rows of its forward pass, not on the other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from numpy.typing import NDArray

from pipeline.tensors import name_of, to_numpy
from schemas.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """One prompt's contexts on the host. T text tokens; bfloat16 as uint16 bits."""

    video: NDArray[np.generic]
    """[T, D_video]"""
    audio: NDArray[np.generic]
    """[T, D_audio]"""
    mask: NDArray[np.uint8]
    """1 where a token is attended to, [T]."""
    torch_dtype: str
    digest: str
    """Hex hash of the three arrays' bytes."""

    @property
    def num_bytes(self) -> int:
        return self.video.nbytes + self.audio.nbytes + self.mask.nbytes


class PromptEncoder:
    """Tokenizer, text encoder and connectors of one checkpoint.

    ``text_encoder`` is any of the decoder-only models that diffusers pairs with LTX-2 (Gemma 3, Gemma 4): only its
    hidden states are used, so its language-model head never runs.
    """

    def __init__(
        self, tokenizer: Any, text_encoder: Any, connectors: LTX2TextConnectors, *, max_prompt_tokens: int
    ) -> None:
        self.tokenizer, self.connectors = tokenizer, connectors
        self._backbone = text_encoder.base_model
        self._max_prompt_tokens = max_prompt_tokens
        # Gemma is trained with its padding on the left.
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

    def check(self, prompt: str, field: str = "prompt") -> None:
        """Raises ValueError (a Problem) when the prompt has more tokens than the model was trained on."""
        num_tokens = len(self.tokenizer(prompt.strip()).input_ids)
        if num_tokens > self._max_prompt_tokens:
            raise Problem(
                code="invalid_request",
                field=field,
                value=f"{num_tokens} tokens",
                rule=f"a prompt has at most {self._max_prompt_tokens} tokens",
                remedy="shorten it; it is never cut silently",
            ).exception()

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str], *, num_rows: int) -> list[EncodedPrompt]:
        """Contexts of each prompt, from one forward pass of ``num_rows`` rows (padded by repeating the first).

        The prompts have passed ``check``.
        """
        rows = [*prompts, *[prompts[0]] * (num_rows - len(prompts))]
        device = self._backbone.device
        tokens = self.tokenizer(
            [prompt.strip() for prompt in rows],
            padding="max_length",
            max_length=self._max_prompt_tokens,
            return_tensors="pt",
        ).to(device)
        layers = self._backbone(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True
        ).hidden_states
        hidden = torch.stack(layers, dim=-1).flatten(2, 3).to(self.connectors.dtype)
        video, audio, mask = self.connectors(
            hidden, tokens.attention_mask, padding_side=self.tokenizer.padding_side
        )
        return [_on_host(video[i], audio[i], mask[i]) for i in range(len(prompts))]


def _on_host(video: torch.Tensor, audio: torch.Tensor, mask: torch.Tensor) -> EncodedPrompt:
    arrays = to_numpy(video.clone()), to_numpy(audio.clone()), to_numpy(mask.to(torch.uint8))
    digest = blake2b(digest_size=16)
    for array in arrays:
        digest.update(array)
    return EncodedPrompt(
        video=arrays[0],
        audio=arrays[1],
        mask=arrays[2].astype(np.uint8, copy=False),
        torch_dtype=name_of(video.dtype),
        digest=digest.hexdigest(),
    )
