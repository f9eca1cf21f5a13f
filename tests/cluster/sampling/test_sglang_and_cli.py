"""SGLang's rollout API and the command line against a running app: the same numbers in other people's forms."""

import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch
from apps import App, until
from PIL import Image

from deployments.cli.__main__ import main
from schemas.conditioning import read_conditioning
from schemas.trajectory import read_trajectory
from tests.sglang_tables import read_answer

ASKED = {
    "prompt": "a red ball",
    "seed": 7,
    "num_inference_steps": 4,
    "num_outputs_per_prompt": 2,
    "rollout_sde_step_indices": [0, 2],
    "rollout_audio_sde_type": "cps",
    "rollout_audio_noise_level": 0.5,
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
}


def table(http: httpx.Client, path: str) -> pa.Table:
    return pa.ipc.open_stream(http.get(path).raise_for_status().content).read_all()


def run_of(http: httpx.Client) -> str:
    return str(http.get("/v1/weights").json()["replicas"][0]["run"])


def zero_where_none(values: list[float | None]) -> torch.Tensor:
    return torch.tensor([0.0 if value is None else value for value in values])


def test_its_answer_has_the_numbers_of_our_own_forms_to_the_bit(plain: App) -> None:
    with plain.http() as http:
        samples = read_answer(http.post("/rollout/generate", json=ASKED).raise_for_status().content)
        rollout = f"/v1/rollouts/{samples[0]['request_id']}"
        summary = http.get(rollout).json()
        conditioning = read_conditioning(table(http, f"{rollout}/conditioning"))
        assert [sample["sample_index"] for sample in samples] == [0, 1]
        for sample, ours in zip(samples, summary["samples"], strict=True):
            path = f"{rollout}/samples/{sample['sample_index']}"
            view, states = read_trajectory(table(http, f"{path}/trajectory")), sample["dit_trajectory"]
            assert torch.equal(sample["rollout_log_probs"], zero_where_none(ours["log_probs_video"]))
            assert torch.equal(sample["audio_log_probs"], zero_where_none(ours["log_probs_audio"]))
            assert (
                sample["rollout_log_probs"].count_nonzero() == sample["audio_log_probs"].count_nonzero() == 2
            )
            assert np.array_equal(states["latents"], view.video_latents)
            assert np.array_equal(states["audio_latents"], view.audio_latents)
            assert np.array_equal(states["sigmas"], np.float32(summary["sigmas"]))
            assert sample["kept_step_indices"] == view.steps.tolist() == [0, 1, 2, 3, 4]
            assert (sample["seed"], sample["policy_version"]) == (7, ours["policy_version"])
            assert sample["weights_digest"] == view.manifest["weights_digest"]
            frame = Image.open(io.BytesIO(http.get(f"{path}/frames/3.png").content))
            assert np.array_equal((sample["generated_output"][3] * 255).round().to(torch.uint8), frame)
            sound = http.get(f"{path}/audio.wav").content
            assert sound.endswith(sample["audio"].T.contiguous().numpy().tobytes())
        contexts = samples[1]["denoising_env"]["pos_cond_kwargs"]
        assert np.array_equal(contexts["encoder_hidden_states"], conditioning.video_context)
        assert np.array_equal(contexts["audio_encoder_hidden_states"], conditioning.audio_context)


def test_a_seed_that_is_left_out_is_drawn_and_told_and_an_evaluation_has_no_log_probs(plain: App) -> None:
    with plain.http() as http:
        (first,), (second,), (watched,) = (
            read_answer(http.post("/rollout/generate", json=request).raise_for_status().content)
            for request in (
                {"prompt": "a red ball"},
                {"prompt": "a red ball"},
                {"prompt": "a red ball", "rollout": False},
            )
        )
    assert first["seed"] != second["seed"] and first["request"]["guidance"] == {"video": 1.0, "audio": 1.0}
    assert not torch.equal(first["generated_output"], second["generated_output"])
    assert watched["rollout_log_probs"] is None and watched["request"]["mode"] == "generate"


def test_its_weight_routes_reach_the_fleet(plain: App) -> None:
    with plain.http() as http:
        fleet = http.get("/v1/weights").json()
        digest = {"transformer": fleet["replicas"][0]["weights_digest"]}
        assert http.post("/get_weights_checksum", json={}).json() == digest
        refused = http.post("/update_weights_from_disk", json={"model_path": "/etc"})
        assert refused.status_code == 400 and "http.weights_root" in refused.json()["message"]
        try:
            assert http.post("/release_memory_occupation").json()["sleeping"] is True
            until(lambda: run_of(http) == "asleep")  # an earlier word of the replica may come in after
        finally:
            assert http.post("/resume_memory_occupation").json()["sleeping"] is False
        until(lambda: run_of(http) == "running")


def test_the_command_line_samples_writes_and_shows_a_group(plain: App, tmp_path: Path, capsys: Any) -> None:
    run, clip = tmp_path / "run", tmp_path / "clip.mp4"
    assert main(["status", "--url", plain.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == "tiny"
    assert main(["weights", "--url", plain.url]) == 0
    assert "policy version 0, running" in capsys.readouterr().out
    command = ["rollout", "a red ball", "--group", "2", "--seed", "7", "--out", str(run), "--url", plain.url]
    assert main([*command, "--num-inference-steps", "4"]) == 0
    for index in range(2):
        with pa.memory_map(str(run / f"sample-{index}.arrows")) as file:
            view = read_trajectory(pa.ipc.open_stream(file).read_all())
        assert (view.manifest["sample_index"], view.manifest["seed"]) == (index, 7)
    capsys.readouterr()
    assert main(["inspect", str(run)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5 and (run / "log-probs.png").stat().st_size > 10_000
    assert (
        main(["generate", "a red ball", "-o", str(clip), "--num-inference-steps", "2", "--url", plain.url])
        == 0
    )
    assert clip.read_bytes()[4:8] == b"ftyp"


@pytest.mark.parametrize(
    "body", [{"prompt": "a", "num_frames": 120}, {"prompt": "a", "num_outputs_per_prompt": 9}]
)
def test_what_cannot_be_sampled_is_told_in_the_callers_words(plain: App, body: dict[str, Any]) -> None:
    with plain.http() as http:
        refused = http.post("/rollout/generate", json=body)
    assert refused.status_code == 422 and refused.json()["field"] == list(body)[1]
