"""Checkpoints in diffusers' layout: finding one, loading single components of it, and reading its card.

A model is named by "tiny" or "small" (generated on first use), by a folder, or by a hub id "owner/name";
from there on all three take the same path. Component classes are those that `model_index.json` names, so
LTX-2 (a vocoder without bandwidth extension, connectors without projections per modality) and LTX-2.5
(Gemma 4) need no line of their own here.

Does not know what a component is for, nor which deployment needs which.

Invariants: a card is read from configuration files alone, and of a hub id nothing else is downloaded for
it; a loaded model is in eval mode and asks for no gradients; torch's global generator stays where it was.
"""

import hashlib
import importlib
import inspect
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError

from pipeline import tiny
from schemas.card import Defaults, Limits, ModelCard

COMPONENTS = (
    "audio_vae",
    "connectors",
    "scheduler",
    "text_encoder",
    "tokenizer",
    "transformer",
    "vae",
    "vocoder",
)
"""What is served. A checkpoint may have more (a prompt enhancer, a duration head); they are left alone."""

MAX_PROMPT_TOKENS = 1024
"""The length to which LTX-2 pads every prompt (diffusers' LTX2Pipeline: max_sequence_length)."""

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_INDEX = "model_index.json"
_REMEDY = (
    f"use {' or '.join(map(repr, tiny.NAMES))}, a folder with a {_INDEX}, or a hub id such as"
    " 'diffusers/LTX-2.3-Diffusers'"
)
_VOLATILE = ("_diffusers_version", "_name_or_path", "transformers_version")
"""Config entries that differ between two copies of one architecture."""


def folder(model: str) -> str:
    """Where `model` is: the folder of a generated checkpoint (built now if need be), else `model` itself."""
    return str(tiny.build(model)) if model in tiny.NAMES else model


def load(
    model: str, component: str, *, dtype: str = "float32", device: str = "cpu", low_memory: bool = False
) -> Any:
    """One component of the checkpoint `model`, of the class that its model_index.json names.

    A component with weights comes in `dtype` ("float32", "bfloat16" or "float16") on `device`, in eval mode,
    requires_grad False; a tokenizer or a scheduler has neither. With `low_memory` the weights go straight to
    the device, file by file, and host memory never holds a whole copy.

    Raises ValueError for a model, component or dtype that does not exist.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = folder(model)
    component_class = _class(source, _index(source), component)
    if not issubclass(component_class, torch.nn.Module):
        return component_class.from_pretrained(source, subfolder=component)
    dtype_name = "torch_dtype" if issubclass(component_class, diffusers.ModelMixin) else "dtype"
    placement = {"low_cpu_mem_usage": True, "device_map": {"": device}} if low_memory else {}
    with torch.random.fork_rng(devices=[]):  # diffusers draws initial values before it reads the real ones
        loaded = component_class.from_pretrained(
            source, subfolder=component, **{dtype_name: DTYPES[dtype]}, **placement
        )
    return loaded.to(device).eval().requires_grad_(False)


def read_card(model: str, limits: Limits, defaults: Defaults) -> ModelCard:
    """The card of the checkpoint `model`, from its configuration files alone.

    Raises ValueError when the model does not exist or is not an LTX-2 checkpoint.
    """
    source = folder(model)
    index = _index(source)
    classes = {component: _class(source, index, component) for component in COMPONENTS}
    stored = {component: _stored_config(source, component, classes[component]) for component in COMPONENTS}
    config = {
        component: {**_class_defaults(classes[component]), **stored[component]} for component in COMPONENTS
    }
    transformer, connectors = config["transformer"], config["connectors"]
    audio, vocoder = config["audio_vae"], config["vocoder"]
    vae_shape = _without_weights(classes["vae"], stored["vae"])
    audio_vae_shape = _without_weights(classes["audio_vae"], stored["audio_vae"])
    prompt_tokens = config["tokenizer"].get("model_max_length", MAX_PROMPT_TOKENS)
    return ModelCard(
        checkpoint=model,
        checkpoint_digest=_digest(stored),
        spatial_ratio=vae_shape.spatial_compression_ratio,
        temporal_ratio=vae_shape.temporal_compression_ratio,
        patch_size=transformer["patch_size"],
        patch_size_t=transformer["patch_size_t"],
        video_channels=transformer["in_channels"],
        audio_sample_rate=audio["sample_rate"],
        audio_hop_length=audio["mel_hop_length"],
        audio_temporal_ratio=audio_vae_shape.temporal_compression_ratio,
        audio_latent_channels=audio["latent_channels"],
        audio_mel_bins=audio["mel_bins"],
        audio_mel_ratio=audio_vae_shape.mel_compression_ratio,
        waveform_sample_rate=vocoder["output_sampling_rate"],
        waveform_channels=vocoder.get("bwe_out_channels", vocoder["out_channels"]),
        num_layers=transformer["num_layers"],
        max_prompt_tokens=min(MAX_PROMPT_TOKENS, int(prompt_tokens)),
        video_context_dim=_context_dim(connectors, "video"),
        audio_context_dim=_context_dim(connectors, "audio"),
        scheduler={key: value for key, value in stored["scheduler"].items() if key not in _VOLATILE},
        limits=limits,
        defaults=defaults,
    )


def _index(source: str) -> dict[str, Any]:
    """Component to [library, class], of the components that the checkpoint has."""
    entries = _json(source, _INDEX).items()
    return {name: entry for name, entry in entries if isinstance(entry, list) and None not in entry}


def _class(source: str, index: Mapping[str, Any], component: str) -> Any:
    """The class of an index entry [library, class]; "ltx2" there is a subpackage of diffusers' pipelines."""
    if component not in index:
        raise ValueError(
            f"{_INDEX} of {source!r} must name {component!r}, got {', '.join(sorted(index)) or 'nothing'};"
            " use one of those, or an LTX-2 checkpoint in diffusers' layout"
        )
    library, name = index[component]
    module = library if library in ("diffusers", "transformers") else f"diffusers.pipelines.{library}"
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{component} of {source!r} must be a class of diffusers {diffusers.__version__} or transformers,"
            f" got {library}.{name}; install the version that the checkpoint was saved with"
        ) from error


def _stored_config(source: str, component: str, component_class: Any) -> dict[str, Any]:
    """The component's JSON as it was saved."""
    if issubclass(component_class, torch.nn.Module):
        return _json(source, f"{component}/config.json")
    kind = "scheduler" if component == "scheduler" else "tokenizer"
    return _json(source, f"{component}/{kind}_config.json")


def _class_defaults(component_class: Any) -> dict[str, Any]:
    """What diffusers' constructor takes for entries that an older config does not have."""
    parameters = inspect.signature(component_class.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def _without_weights(component_class: Any, config: Mapping[str, Any]) -> Any:
    """The model on the meta device: it computes its ratios, and has neither weights nor initialisation."""
    with torch.device("meta"):
        return component_class.from_config(dict(config))


def _context_dim(connectors: Mapping[str, Any], modality: str) -> int:
    heads = connectors[f"{modality}_connector_num_attention_heads"]
    return int(heads * connectors[f"{modality}_connector_attention_head_dim"])


def _digest(stored: Mapping[str, Mapping[str, Any]]) -> str:
    kept = {
        component: {key: value for key, value in config.items() if key not in _VOLATILE}
        for component, config in stored.items()
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _json(source: str, relative: str) -> dict[str, Any]:
    """A JSON file of a local folder, or of a hub repository (downloaded alone, then cached)."""
    if os.path.isdir(source):
        path = Path(source) / relative
        if not path.is_file():
            raise ValueError(f"{source!r} is not a diffusers checkpoint: {path} does not exist; {_REMEDY}")
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not source.startswith("."):
        try:
            path = Path(hf_hub_download(source, relative))
        except (RepositoryNotFoundError, EntryNotFoundError, HfHubHTTPError) as error:
            raise ValueError(
                f"{relative} of {source!r} was found neither in a folder of that name nor on the hub"
                f" ({type(error).__name__}); {_REMEDY}; for a hub id check the network and the access token"
            ) from error
    else:
        raise ValueError(f"there is no model {source!r}, neither generated nor as a folder; {_REMEDY}")
    content: dict[str, Any] = json.loads(path.read_text())
    return content
