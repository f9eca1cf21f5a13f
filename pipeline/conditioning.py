"""What the transformer attends to: a prompt's contexts, as tensors on the denoiser's device."""

from dataclasses import dataclass

import pyarrow as pa
import torch
from torch import Tensor

from pipeline.tensors import frozen
from schemas.arrow import Array
from schemas.conditioning import read_conditioning


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One prompt after the connectors. T text tokens."""

    video: Tensor
    """Context of the video branch, [T, D_video]."""
    audio: Tensor
    """Context of the audio branch, [T, D_audio]."""
    mask: Tensor | None
    """1 where a token is attended to, int64 [T]; None where all are, which keeps attention on its fast path."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class Conditioning:
    """The contexts of one prompt, shared by its whole group."""

    positive: Context
    negative: Context | None
    """Context of the negative prompt; None where guidance needs none."""
    digest: str
    """Hash of the contexts' bytes, as stamped by the text encoder."""

    @property
    def masked(self) -> bool:
        """Whether some token of a prompt is not attended to."""
        return any(c is not None and c.mask is not None for c in (self.positive, self.negative))


def read(table: pa.Table, device: torch.device) -> Conditioning:
    """The tensors of a conditioning table: zero-copy on the CPU, moved once elsewhere.

    Where any of its contexts needs a mask all get one, so that the form of a pass never depends on which of them share it.
    """
    view = read_conditioning(table)
    masks = [mask for mask in (view.text_mask, view.negative_text_mask) if mask is not None]
    all_valid = all(mask.all() for mask in masks)

    def context(video: Array, audio: Array, mask: Array) -> Context:
        return Context(
            video=frozen(video, view.torch_dtype).to(device),
            audio=frozen(audio, view.torch_dtype).to(device),
            mask=None if all_valid else frozen(mask).to(device, torch.int64),
        )

    negative = None
    if view.negative_video_context is not None:
        assert view.negative_audio_context is not None and view.negative_text_mask is not None
        negative = context(view.negative_video_context, view.negative_audio_context, view.negative_text_mask)
    return Conditioning(
        positive=context(view.video_context, view.audio_context, view.text_mask),
        negative=negative,
        digest=view.manifest["digest"],
    )
