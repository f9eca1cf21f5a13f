"""The generated checkpoints are real LTX-2.3 pipelines, the same to the byte, and answer to their inputs."""

import hashlib
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2Pipeline
from torch import Tensor

from pipeline import tiny

LATENT_FRAMES, LATENT_HEIGHT, LATENT_WIDTH, AUDIO_FRAMES = 2, 2, 3, 9  # 64x96, 9 frames at 24 a second
UNGUIDED: dict[str, Any] = {
    "guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "audio_guidance_rescale": 0.0,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Operators this small gain nothing from threads, and on a busy machine threads wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=tiny.NAMES)
def pipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("checkpoints")
    loaded = LTX2Pipeline.from_pretrained(tiny.build(request.param, root=root))
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.mark.parametrize("guider", ["off", "native"])
def test_diffusers_own_pipeline_runs_it_end_to_end(pipe: Any, guider: str) -> None:
    last_block = pipe.transformer.config.num_layers - 1
    options = UNGUIDED if guider == "off" else {"spatio_temporal_guidance_blocks": [last_block]}
    frames, waveform = pipe(
        "a red cat by the sea",
        height=64,
        width=96,
        num_frames=9,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        return_dict=False,
        **options,
    )
    assert frames.shape == (1, 9, 64, 96, 3)
    assert waveform.shape == (1, 2, (4 * AUDIO_FRAMES - 3) * 160 * 3)  # causal: 4 mel frames each, less 3
    assert np.isfinite(frames).all() and torch.isfinite(waveform).all()
    assert frames.std() > 0.05 and waveform.std() > 0.02


def test_velocity_has_the_size_of_a_trained_one_and_differs_between_tokens(pipe: Any) -> None:
    for velocity in _velocity(pipe):
        assert 0.5 < velocity.std() < 3
        assert velocity.std(dim=1).mean() > 0.3


@pytest.mark.parametrize("changed", ["text", "timestep", "video", "audio"])
def test_both_velocities_answer_to_every_input(pipe: Any, changed: str) -> None:
    before, after = _velocity(pipe), _velocity(pipe, changed=changed)
    for modality, one, other in zip(("video", "audio"), before, after, strict=True):
        assert (one - other).norm() > 0.05 * one.norm(), modality


def test_both_velocities_answer_to_isolation_and_to_a_skipped_attention(pipe: Any) -> None:
    before = _velocity(pipe)
    last_block = pipe.transformer.config.num_layers - 1
    for options in ({"isolate_modalities": True}, {"spatio_temporal_guidance_blocks": [last_block]}):
        for one, other in zip(before, _velocity(pipe, **options), strict=True):
            assert (one - other).norm() > 0.05 * one.norm(), options


def test_latent_statistics_are_not_the_identity(pipe: Any) -> None:
    for vae in (pipe.vae, pipe.audio_vae):
        assert vae.latents_mean.abs().mean() > 0.1
        assert (vae.latents_std - 1).abs().mean() > 0.1
        assert vae.latents_std.min() > 0.3


def test_frames_get_brighter_with_their_latents_and_are_not_saturated(pipe: Any) -> None:
    latents = _noise(1, pipe.transformer.config.in_channels, LATENT_FRAMES, LATENT_HEIGHT, LATENT_WIDTH)
    darker, frames, brighter = (_decode_video(pipe, latents + shift) for shift in (-1.0, 0.0, 1.0))
    assert darker.mean() + 0.1 < frames.mean() < brighter.mean() - 0.05
    assert 0.3 < frames.mean() < 0.7 and frames.std() > 0.1
    assert ((frames == 0) | (frames == 1)).float().mean() < 0.1


def test_frames_get_redder_with_a_third_of_the_channels(pipe: Any) -> None:
    latents = _noise(1, pipe.transformer.config.in_channels, LATENT_FRAMES, LATENT_HEIGHT, LATENT_WIDTH)
    redness = [_redness(_decode_video(pipe, _shift_red(pipe, latents, shift))) for shift in (-1.0, 0.0, 1.0)]
    assert redness[0] + 0.05 < redness[1] < redness[2] - 0.05


def test_the_waveform_gets_several_times_louder_with_its_latents_and_is_not_clipped(pipe: Any) -> None:
    latents = _noise(1, AUDIO_FRAMES, pipe.transformer.config.audio_in_channels)
    softer, normal, louder = (_rms(_decode_audio(pipe, latents + shift)) for shift in (-1.0, 0.0, 1.0))
    assert louder > 3 * softer and softer < normal < louder
    flatter, stronger = (_rms(_decode_audio(pipe, latents * scale)) for scale in (0.25, 4.0))
    assert stronger > 2 * flatter
    waveform = _decode_audio(pipe, latents)
    assert 0.05 < normal < 0.5
    assert (waveform.abs() >= 1).float().mean() < 0.01


def test_loudness_follows_the_latents_in_time(pipe: Any) -> None:
    latents = _noise(1, AUDIO_FRAMES, pipe.transformer.config.audio_in_channels)
    ramp = torch.linspace(-1.5, 1.5, AUDIO_FRAMES)[None, :, None]
    first, second = _decode_audio(pipe, latents + ramp).chunk(2, dim=-1)
    assert _rms(second) > 1.5 * _rms(first)


def test_the_bandwidth_extender_hears_a_tone_in_the_right_mel_bin(pipe: Any) -> None:
    def loudest(frequency: float) -> int:
        time = torch.arange(16000) / 16000
        log_mel = pipe.vocoder.mel_stft(torch.sin(2 * torch.pi * frequency * time)[None])[0]
        return int(log_mel[0, :, 50:].mean(dim=-1).argmax())

    bins = [loudest(frequency) for frequency in (500.0, 1500.0, 4000.0, 7000.0)]
    assert bins == sorted(set(bins))


def test_the_tokenizer_reads_any_text_and_pads_on_the_left(pipe: Any) -> None:
    tokenizer = pipe.tokenizer
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]) == list(range(5))
    text = "The cat, 猫, sings «là» 🎵"
    encoded = tokenizer(text, padding="max_length", max_length=64).input_ids
    assert encoded[0] == tokenizer.pad_token_id and encoded[-1] != tokenizer.pad_token_id
    assert tokenizer.unk_token_id not in encoded
    assert tokenizer.decode(encoded, skip_special_tokens=True) == text
    assert tokenizer.model_max_length == 1024


def test_small_has_about_ten_million_parameters_and_tiny_fits_two_megabytes(tmp_path: Path) -> None:
    size = {
        name: sum(file.stat().st_size for file in tiny.build(name, root=tmp_path).rglob("*.safetensors"))
        for name in tiny.NAMES
    }
    assert size["tiny"] < 2.5e6
    weights = (tiny.build("small", root=tmp_path) / "transformer").glob("*.safetensors")
    assert 8e6 < sum(file.stat().st_size for file in weights) / 4 < 12e6


def test_two_processes_that_build_at_once_both_succeed_and_agree_with_a_third(tmp_path: Path) -> None:
    command = "import sys; from pipeline import tiny; print(tiny.build('tiny', root=sys.argv[1]))"
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", command, str(tmp_path / "shared")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    folders = {builder.communicate(timeout=300)[0].strip() for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0]
    assert folders == {
        str(entry) for entry in (tmp_path / "shared").iterdir()
    }  # one folder, nothing left over
    assert _digests(Path(folders.pop())) == _digests(tiny.build("tiny", root=tmp_path / "alone"))


def test_threads_and_their_number_change_no_bit(tmp_path: Path) -> None:
    reference = _digests(tiny.build("tiny", root=tmp_path / "reference"))
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(2) as threads:
            roots = [tmp_path / "a", tmp_path / "b"]
            built = list(threads.map(lambda root: _digests(tiny.build("tiny", root=root)), roots))
    finally:
        torch.set_num_threads(1)
    assert built == [reference, reference]


def test_building_touches_no_global_generator(tmp_path: Path) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # type: ignore[index]
    tiny.build("tiny", root=tmp_path)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # type: ignore[index]
    assert before[2] == random.getstate()


def test_a_checkpoint_is_built_once_and_named_after_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tiny.CACHE_VARIABLE, str(tmp_path))
    built = tiny.build("tiny")
    assert built == tmp_path / f"tiny-{tiny.version_key()}"
    written = (built / "model_index.json").stat().st_mtime_ns
    assert tiny.build("tiny") == built
    assert (built / "model_index.json").stat().st_mtime_ns == written


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="small, tiny, got 'huge'"):
        tiny.build("huge")


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def _velocity(pipe: Any, changed: str = "", **options: Any) -> tuple[Tensor, Tensor]:
    """Video and audio velocity, [1, L, C], for fixed inputs; one of them replaced by another."""
    prompt = "two dogs run in the snow" if changed == "text" else "a red cat by the sea"
    embeds, mask, _, _ = pipe.encode_prompt(prompt, do_classifier_free_guidance=False)
    video_context, audio_context, context_mask = pipe.connectors(embeds, mask, padding_side="left")
    config = pipe.transformer.config
    num_tokens = LATENT_FRAMES * LATENT_HEIGHT * LATENT_WIDTH
    timestep = torch.tensor([500.0 if changed == "timestep" else 700.0])
    video, audio = pipe.transformer(
        hidden_states=_noise(1, num_tokens, config.in_channels, seed=int(changed == "video")),
        audio_hidden_states=_noise(1, AUDIO_FRAMES, config.audio_in_channels, seed=int(changed == "audio")),
        encoder_hidden_states=video_context,
        audio_encoder_hidden_states=audio_context,
        timestep=timestep,
        sigma=timestep,
        encoder_attention_mask=context_mask,
        audio_encoder_attention_mask=context_mask,
        num_frames=LATENT_FRAMES,
        height=LATENT_HEIGHT,
        width=LATENT_WIDTH,
        audio_num_frames=AUDIO_FRAMES,
        use_cross_timestep=True,
        return_dict=False,
        **options,
    )
    return video, audio


@torch.no_grad()
def _decode_video(pipe: Any, latents: Tensor) -> Tensor:
    """Normalised latents [1, C, F, H, W] to frames [1, 3, F', H', W'] in [0, 1]."""
    raw = pipe._denormalize_latents(latents, pipe.vae.latents_mean, pipe.vae.latents_std)
    frames = pipe.vae.decode(raw, return_dict=False)[0]
    visible: Tensor = (frames / 2 + 0.5).clamp(0, 1)
    return visible


@torch.no_grad()
def _decode_audio(pipe: Any, latents: Tensor) -> Tensor:
    """Normalised packed latents [1, L, C] to a waveform [1, 2, N]."""
    vae = pipe.audio_vae
    raw = pipe._denormalize_audio_latents(latents, vae.latents_mean, vae.latents_std)
    spectrum = pipe._unpack_audio_latents(raw, latents.shape[1], num_mel_bins=vae.config.mel_bins // 4)
    waveform: Tensor = pipe.vocoder(vae.decode(spectrum, return_dict=False)[0])
    return waveform


def _shift_red(pipe: Any, latents: Tensor, shift: float) -> Tensor:
    """The latent channels that the decoder's fold carries to red, moved by `shift`."""
    num_last = pipe.vae.config.decoder_block_out_channels[0]
    red = torch.arange(latents.shape[1]) % num_last % 3 == 0
    return latents.add(red.float()[None, :, None, None, None], alpha=shift)


def _redness(frames: Tensor) -> float:
    return float(frames[:, 0].mean() - frames[:, 1:].mean())


def _rms(waveform: Tensor) -> float:
    return float(waveform.square().mean().sqrt())


def _digests(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
