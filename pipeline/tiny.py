"""Generates small, real LTX-2.3 checkpoints in diffusers' layout, from nothing but this repository.

`tiny` (about two megabytes) is for tests and first steps, `small` (about 10 million parameters in the
transformer) for benchmarks. Both are loaded by the same code as the 22B one and run in diffusers'
LTX2Pipeline.

Does not know what a checkpoint is used for; checkpoint.py loads it.

Invariants: the same source gives the same bytes; no global random generator is touched; a folder under
its final name is complete, however many processes build at once; a changed recipe gets a new folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2VocoderWithBWE

from pipeline.tiny_configs import (
    IMAGE_TOKENS,
    MAX_PROMPT_TOKENS,
    MERGES,
    RECIPES,
    SCHEDULER,
    Recipe,
    vocabulary,
)
from pipeline.tiny_weights import tensors

CACHE_VARIABLE = "LTX_ROLLOUT_CACHE"
NAMES = tuple(RECIPES)


def build(name: str, root: str | Path | None = None) -> Path:
    """Folder of the generated checkpoint `name` ("tiny" or "small"); written on first use, then reused.

    root: where to keep it; by default $LTX_ROLLOUT_CACHE, or ~/.cache/ltx-rollout.
    Raises ValueError for another name.
    """
    if name not in RECIPES:
        raise ValueError(
            f"the generated checkpoints are {', '.join(sorted(RECIPES))}, got {name!r}; use one of them"
        )
    parent = Path(root) if root is not None else cache_root()
    target = parent / f"{name}-{version_key()}"
    if not target.exists():
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=parent))
        try:
            _write(scratch, RECIPES[name])
            _publish(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def cache_root() -> Path:
    """Where generated checkpoints live: $LTX_ROLLOUT_CACHE, or ~/.cache/ltx-rollout."""
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured) if configured else Path.home() / ".cache" / "ltx-rollout"


@functools.cache
def version_key() -> str:
    """16 hex digits of all that decides the bytes: the sources of the recipe and the libraries' versions."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("tiny*.py")):
        digest.update(source.read_bytes())
    for library in (diffusers, transformers, np):
        digest.update(f"{library.__name__} {library.__version__}".encode())
    return digest.hexdigest()


def _write(folder: Path, recipe: Recipe) -> None:
    for component, model in _models(recipe).items():
        shapes = {key: value.shape for key, value in model.state_dict().items()}
        model.load_state_dict(tensors(component, shapes), assign=True)
        if component == "text_encoder":
            model.tie_weights()  # the tied head was given values of its own
        model.save_pretrained(folder / component)
    _tokenizer().save_pretrained(folder / "tokenizer")
    diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text(json.dumps(_index(), indent=2) + "\n")


def _models(recipe: Recipe) -> dict[str, Any]:
    vocab = vocabulary()
    text_config = transformers.Gemma3Config(
        text_config={**recipe.text_config, "vocab_size": len(vocab)},
        vision_config=dict(recipe.vision_config),
        mm_tokens_per_image=4,
        boi_token_index=vocab[IMAGE_TOKENS[0]],
        eoi_token_index=vocab[IMAGE_TOKENS[1]],
        image_token_index=vocab[IMAGE_TOKENS[2]],
    )
    with torch.device("meta"):  # shapes only: nothing is initialised, so no generator is consulted
        return {
            "transformer": diffusers.LTX2VideoTransformer3DModel(**recipe.transformer),
            "vae": diffusers.AutoencoderKLLTX2Video(**recipe.vae),
            "audio_vae": diffusers.AutoencoderKLLTX2Audio(**recipe.audio_vae),
            "vocoder": LTX2VocoderWithBWE(**recipe.vocoder),
            "connectors": LTX2TextConnectors(**recipe.connectors),
            "text_encoder": transformers.Gemma3ForConditionalGeneration(text_config),
        }


def _tokenizer() -> Any:
    return transformers.GemmaTokenizer(
        vocab=vocabulary(),
        merges=[tuple(merge.split()) for merge in MERGES],
        padding_side="left",
        model_max_length=MAX_PROMPT_TOKENS,
    )


def _index() -> dict[str, Any]:
    return {
        "_class_name": "LTX2Pipeline",
        "_diffusers_version": diffusers.__version__,
        "audio_vae": ["diffusers", "AutoencoderKLLTX2Audio"],
        "connectors": ["ltx2", "LTX2TextConnectors"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Gemma3ForConditionalGeneration"],
        "tokenizer": ["transformers", "GemmaTokenizer"],
        "transformer": ["diffusers", "LTX2VideoTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLLTX2Video"],
        "vocoder": ["ltx2", "LTX2VocoderWithBWE"],
    }


def _publish(scratch: Path, target: Path) -> None:
    """Give `scratch` its final name in one step; where another process was first, its equal result stays."""
    try:
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        if not target.exists():
            raise
