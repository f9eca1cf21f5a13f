"""Checkpoints are found by name, folder or hub id, load as the classes they name, and have a card."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2Vocoder

from pipeline import checkpoint, tiny
from schemas.card import Defaults, Limits, ModelCard

LIMITS = Limits(
    max_num_samples=8,
    max_inference_steps=50,
    max_video_tokens=1000,
    max_audio_tokens=500,
    max_prompt_chars=2000,
    max_deadline_s=60.0,
)
DEFAULTS = Defaults(
    height=64, width=96, num_frames=9, frame_rate=24.0, num_inference_steps=4, deadline_s=30.0
)
MODELS = ("audio_vae", "connectors", "text_encoder", "transformer", "vae", "vocoder")


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("tiny", root=tmp_path_factory.mktemp("cache")))


@pytest.fixture
def configs_only(tiny_folder: str, tmp_path: Path) -> Path:
    """The checkpoint's JSON files without a single weight."""
    copy = tmp_path / "configs"
    shutil.copytree(tiny_folder, copy, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer.json"))
    return copy


def card_of(folder: Path | str) -> ModelCard:
    return checkpoint.read_card(str(folder), LIMITS, DEFAULTS)


def test_a_generated_name_is_a_folder_and_any_other_name_is_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tiny.CACHE_VARIABLE, str(tmp_path))
    assert checkpoint.folder("tiny") == str(tiny.build("tiny"))
    assert checkpoint.folder("diffusers/LTX-2.3-Diffusers") == "diffusers/LTX-2.3-Diffusers"


@pytest.mark.parametrize("component", MODELS)
def test_a_model_loads_as_its_class_in_its_dtype_frozen_and_in_eval_mode(
    tiny_folder: str, component: str
) -> None:
    loaded = checkpoint.load(tiny_folder, component, dtype="bfloat16")
    index = json.loads((Path(tiny_folder) / "model_index.json").read_text())
    assert type(loaded).__name__ == index[component][1]
    assert not loaded.training
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("component", MODELS)
def test_low_memory_changes_no_weight_and_leaves_none_behind(tiny_folder: str, component: str) -> None:
    plain = checkpoint.load(tiny_folder, component)
    frugal = checkpoint.load(tiny_folder, component, low_memory=True)
    for tensors, others in ((plain.parameters(), frugal.parameters()), (plain.buffers(), frugal.buffers())):
        for one, other in zip(tensors, others, strict=True):
            assert other.device == one.device
            assert torch.equal(one, other)


def test_tokenizer_and_scheduler_load_without_a_dtype(tiny_folder: str) -> None:
    assert checkpoint.load(tiny_folder, "tokenizer").padding_side == "left"
    assert checkpoint.load(tiny_folder, "scheduler").config.shift_terminal == 0.1


def test_loading_and_reading_the_card_leave_the_global_generator_alone(tiny_folder: str) -> None:
    before = torch.get_rng_state()
    card_of(tiny_folder)
    for component in checkpoint.COMPONENTS:
        checkpoint.load(tiny_folder, component)
    assert torch.equal(before, torch.get_rng_state())


def test_the_card_says_what_the_loaded_components_are(tiny_folder: str) -> None:
    card = card_of(tiny_folder)
    parts = {component: checkpoint.load(tiny_folder, component) for component in checkpoint.COMPONENTS}
    transformer, audio_vae = parts["transformer"].config, parts["audio_vae"].config
    assert (card.spatial_ratio, card.temporal_ratio) == (32, 8)
    assert (card.audio_sample_rate, card.audio_hop_length) == (16000, 160)
    assert (card.audio_temporal_ratio, card.audio_mel_ratio) == (4, 4)
    assert (card.patch_size, card.patch_size_t) == (transformer.patch_size, transformer.patch_size_t)
    assert (card.video_channels, card.num_layers) == (transformer.in_channels, transformer.num_layers)
    assert (card.audio_latent_channels, card.audio_mel_bins) == (
        audio_vae.latent_channels,
        audio_vae.mel_bins,
    )
    audio_channels = card.audio_latent_channels * card.audio_mel_bins // card.audio_mel_ratio
    assert audio_channels == transformer.audio_in_channels == len(parts["audio_vae"].latents_mean)
    assert (card.waveform_sample_rate, card.waveform_channels) == (48000, 2)
    assert card.max_prompt_tokens == parts["tokenizer"].model_max_length == 1024
    assert card.scheduler["max_shift"] == parts["scheduler"].config.max_shift == 2.05
    assert (card.limits, card.defaults, card.checkpoint) == (LIMITS, DEFAULTS, tiny_folder)


def test_the_context_dims_are_those_that_the_connectors_give(tiny_folder: str) -> None:
    connectors = checkpoint.load(tiny_folder, "connectors")
    width = connectors.config.caption_channels * connectors.config.text_proj_in_factor
    video, audio, _ = connectors(torch.ones(1, 16, width), torch.ones(1, 16))
    card = card_of(tiny_folder)
    assert (video.shape[-1], audio.shape[-1]) == (card.video_context_dim, card.audio_context_dim)


def test_the_card_needs_no_weights_and_no_tokenizer_file(tiny_folder: str, configs_only: Path) -> None:
    whole, bare = card_of(tiny_folder).model_dump(), card_of(configs_only).model_dump()
    assert whole | {"checkpoint": str(configs_only)} == bare


def test_the_digest_follows_the_architecture_and_not_the_library_version(configs_only: Path) -> None:
    before = card_of(configs_only).checkpoint_digest
    edit(configs_only, "transformer", update={"_diffusers_version": "9.9"})
    assert card_of(configs_only).checkpoint_digest == before
    edit(configs_only, "transformer", update={"num_layers": 3})
    assert card_of(configs_only).checkpoint_digest != before


def test_an_ltx_2_checkpoint_has_a_card_and_its_vocoder_loads(configs_only: Path) -> None:
    vocoder = LTX2Vocoder(
        in_channels=64, hidden_channels=8, upsample_kernel_sizes=[16, 15], upsample_factors=[6, 5]
    )
    vocoder.save_pretrained(configs_only / "vocoder")
    index = json.loads((configs_only / "model_index.json").read_text())
    index["vocoder"] = ["ltx2", "LTX2Vocoder"]
    (configs_only / "model_index.json").write_text(json.dumps(index))
    edit(
        configs_only,
        "connectors",
        drop=("per_modality_projections", "video_hidden_dim", "audio_hidden_dim", "proj_bias"),
    )
    newer = ("gated_attn", "cross_attn_mod", "perturbed_attn", "use_prompt_embeddings")
    edit(configs_only, "transformer", drop=newer)
    card = card_of(configs_only)
    assert (card.waveform_sample_rate, card.waveform_channels) == (24000, 2)
    assert (card.video_context_dim, card.audio_context_dim, card.patch_size) == (32, 16, 1)
    assert isinstance(checkpoint.load(str(configs_only), "vocoder"), LTX2Vocoder)


def test_a_text_encoder_of_another_generation_needs_no_code(configs_only: Path) -> None:
    index = json.loads((configs_only / "model_index.json").read_text())
    index["text_encoder"] = ["transformers", "Gemma4UnifiedForConditionalGeneration"]
    index["duration_head"] = ["ltx2", "LTX2DurationHead"]
    index["prompt_enhancer"] = [None, None]
    (configs_only / "model_index.json").write_text(json.dumps(index))
    assert card_of(configs_only).num_layers == 2


def test_a_hub_id_reads_its_card_and_loads_by_the_same_path(tiny_folder: str, tmp_path: Path) -> None:
    cached = tmp_path / "models--someone--ltx"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / ("0" * 40)).symlink_to(tiny_folder)
    program = """
from pipeline import checkpoint
from tests.test_checkpoint import card_of
print(card_of("someone/ltx").checkpoint_digest)
for component in ("transformer", "text_encoder", "tokenizer"):
    print(type(checkpoint.load("someone/ltx", component)).__name__)
try:
    card_of("someone/else")
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    digest, *classes, refusal = ran.stdout.splitlines()
    assert digest == card_of(tiny_folder).checkpoint_digest
    assert classes == ["LTX2VideoTransformer3DModel", "Gemma3ForConditionalGeneration", "GemmaTokenizer"]
    assert "'someone/else' was found neither in a folder of that name nor on the hub" in refusal


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda folder: card_of("tinny"), "no model 'tinny', neither generated nor as a folder; use 'tiny'"),
        (lambda folder: card_of(f"{folder}/vae"), "model_index.json does not exist; use 'tiny' or 'small'"),
        (lambda folder: checkpoint.load(folder, "unet"), "must name 'unet', got audio_vae, connectors"),
        (lambda folder: checkpoint.load(folder, "vae", dtype="fp16"), "float16, got 'fp16'"),
    ],
)
def test_a_wrong_name_is_refused_with_what_was_looked_for(
    tiny_folder: str, call: Callable[[str], Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        call(tiny_folder)


def test_a_class_that_the_libraries_lack_is_refused_with_their_version(configs_only: Path) -> None:
    index = json.loads((configs_only / "model_index.json").read_text())
    index["vae"] = ["os", "system"]
    (configs_only / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"vae of .* must be a class of diffusers .*, got os\.system"):
        card_of(configs_only)


def edit(
    folder: Path, component: str, *, update: Mapping[str, Any] | None = None, drop: Sequence[str] = ()
) -> None:
    path = folder / component / "config.json"
    config = json.loads(path.read_text()) | dict(update or {})
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))
