"""Deployment of the text stage: a prompt in, its conditioning table out.

A group and its repeats encode once: contexts are kept in a cache bounded in bytes, requests that arrive while their
prompt is being encoded wait for that one encode, and different prompts share a forward pass.
"""

import asyncio
from collections.abc import Sequence

import pyarrow as pa
from cachetools import LRUCache
from ray import serve

from configs.settings import AppConfig
from pipeline.checkpoint import load
from pipeline.text import EncodedPrompt, PromptEncoder
from schemas.card import ModelCard
from schemas.conditioning import pack_conditioning


class TextEncoder:
    """Tokenizer, text encoder and connectors on one device."""

    def __init__(self, config: AppConfig, card: ModelCard) -> None:
        settings = config.text_encoder
        parts = {
            component: load(
                config.model,
                component,
                dtype=settings.dtype,
                device=settings.device,
                low_memory=settings.low_memory,
            )
            for component in ("tokenizer", "text_encoder", "connectors")
        }
        self._encoder = PromptEncoder(**parts, max_prompt_tokens=card.max_prompt_tokens)
        self._stamp = card.stamp
        self._pinned_rows = settings.max_rows if config.batch_invariant else None
        self._contexts: LRUCache[str, EncodedPrompt] = LRUCache(
            settings.cache_bytes, getsizeof=lambda encoded: encoded.num_bytes
        )
        self._encoding: dict[str, asyncio.Future[EncodedPrompt]] = {}
        self.num_encoded = 0
        self._encode_together.set_max_batch_size(settings.max_rows)
        self._encode_together.set_batch_wait_timeout_s(settings.batch_wait_s)
        self._encoder.encode([""], num_rows=self._pinned_rows or 1)

    async def __call__(self, prompt: str, negative_prompt: str | None = None) -> pa.Table:
        """The conditioning of a prompt, with the negative one's contexts where guidance needs them.

        Raises ValueError (a Problem) for a prompt with too many tokens.
        """
        self._encoder.check(prompt)
        if negative_prompt is not None:
            self._encoder.check(negative_prompt, "negative_prompt")
        prompts = [prompt] if negative_prompt is None else [prompt, negative_prompt]
        contexts = await asyncio.gather(*(self._context(text) for text in prompts))
        positive, negative = contexts[0], contexts[1] if len(contexts) > 1 else None
        return pack_conditioning(
            video_context=positive.video,
            audio_context=positive.audio,
            text_mask=positive.mask,
            negative_video_context=negative.video if negative else None,
            negative_audio_context=negative.audio if negative else None,
            negative_text_mask=negative.mask if negative else None,
            torch_dtype=positive.torch_dtype,
            manifest={
                **self._stamp,
                "prompt": prompt,
                "negative_prompt": negative_prompt,
                "digest": "-".join(context.digest for context in contexts),
            },
        )

    async def stats(self) -> dict[str, int]:
        """Prompts that went through the model so far, and bytes held in the cache."""
        return {"num_encoded": self.num_encoded, "cache_bytes": int(self._contexts.currsize)}

    async def _context(self, prompt: str) -> EncodedPrompt:
        cached = self._contexts.get(prompt)
        if cached is not None:
            return cached
        running = self._encoding.get(prompt)
        if running is None:
            running = asyncio.ensure_future(self._encode(prompt))
            self._encoding[prompt] = running
            running.add_done_callback(lambda _: self._encoding.pop(prompt))
        # Shielded: one caller's cancel must not take the encode away from the others.
        return await asyncio.shield(running)

    async def _encode(self, prompt: str) -> EncodedPrompt:
        encoded: EncodedPrompt = await self._encode_together(prompt)
        if encoded.num_bytes <= self._contexts.maxsize:
            self._contexts[prompt] = encoded
        return encoded

    @serve.batch
    async def _encode_together(self, prompts: Sequence[str]) -> list[EncodedPrompt]:
        """One forward pass over the prompts that came in within the batch's waiting time."""
        self.num_encoded += len(prompts)
        num_rows = self._pinned_rows or len(prompts)
        return await asyncio.to_thread(self._encoder.encode, prompts, num_rows=num_rows)
