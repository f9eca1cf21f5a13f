"""What a denoiser does before it reports ready: run every bucket once, and prove batch invariance where it is promised."""

import torch

from pipeline.batching import Buckets
from pipeline.conditioning import Context
from pipeline.noise import MODALITIES, draw, noise_key
from pipeline.sample import token_shape
from pipeline.velocity import Row, VelocityModel
from schemas.card import ModelCard
from schemas.geometry import Geometry, geometry


@torch.inference_mode()
def warm_up(model: VelocityModel, card: ModelCard, buckets: Buckets) -> None:
    """Run a forward pass of each size that the default geometry may have, so that nobody waits for a first
    compilation."""
    of = _default_geometry(card)
    row = _row(0, of, card, model.device)
    for num_rows in buckets.allowed(of.num_video_tokens + of.audio_frames):
        model([row] * num_rows, of)


@torch.inference_mode()
def check_batch_invariance(model: VelocityModel, card: ModelCard, num_rows: int) -> None:
    """Compare a row's bits at every index of a batch of others with those of a batch that repeats it.

    Raises ValueError when they differ: the device's kernels then treat rows by their place (CPUs do) or by their
    neighbours, and a sample's bits would depend on who shares its forward passes.
    """
    of = _default_geometry(card)
    row, *others = (_row(i, of, card, model.device) for i in range(num_rows))
    expected = model([row] * num_rows, of)
    for index in range(num_rows):
        result = model([*others[:index], row, *others[index:]], of)
        if not all(torch.equal(result[modality][index], expected[modality][0]) for modality in MODALITIES):
            raise ValueError(
                f"batch_invariant cannot hold with denoiser.row_buckets [{num_rows}] on {model.device}: a row's bits "
                f"depend on its index in the batch or on the other rows (at index {index}); use row_buckets [1]"
            )


def _default_geometry(card: ModelCard) -> Geometry:
    defaults = card.defaults
    return geometry(
        card,
        height=defaults.height,
        width=defaults.width,
        num_frames=defaults.num_frames,
        frame_rate=defaults.frame_rate,
    )


def _row(seed: int, of: Geometry, card: ModelCard, device: torch.device) -> Row:
    """A row of noise at sigma 1, unlike that of another seed."""

    def context(of_modality: int, dim: int) -> torch.Tensor:
        return draw(noise_key(seed, of_modality, "video", "init"), (card.max_prompt_tokens, dim)).to(device)

    return Row(
        latents={m: draw(noise_key(seed, 0, m, 0), token_shape(of, m)).to(device) for m in MODALITIES},
        sigma=torch.ones((), device=device),
        context=Context(
            video=context(0, card.video_context_dim),
            audio=context(1, card.audio_context_dim),
            mask=None,
        ),
    )
