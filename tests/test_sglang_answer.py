"""SGLang's answer, read as its trainers read it: the numbers are those of our own tables."""

from typing import Any

import msgpack
import numpy as np
import pytest
import safetensors.torch
import torch

from pipeline.tensors import owned
from schemas.conditioning import read_conditioning
from schemas.media import read_media
from schemas.sglang import SGLangRequest
from schemas.sglang_answer import answer_of
from schemas.sglang_wire import PIECE_BYTES, WireTensor, pieces, tensor
from schemas.trajectory import read_trajectory
from tests.sglang_tables import NUM_STEPS, SIGMAS, Tables, as_float32, read_answer, tables

FIELDS_OF_THAT_SERVER = {
    "request_id",
    "prompt",
    "seed",
    "generated_output",
    "rollout_log_probs",
    "rollout_debug_tensors",
    "denoising_env",
    "dit_trajectory",
    "inference_time_s",
    "peak_memory_mb",
}


def answered(of: Tables, **fields: Any) -> Any:
    asked = SGLangRequest.of({"prompt": " a red ball", **fields})
    answer = answer_of(
        asked,
        request_id="mine",
        media=of.media,
        trajectory=of.trajectory if asked.rollout_return_dit_trajectory else None,
        conditioning=of.conditioning if asked.rollout_return_denoising_env else None,
    )
    (read,) = read_answer(b"".join(pieces([answer])))
    return read


def tensor_of(array: Any, dtype: str = "float32") -> torch.Tensor:
    return owned(array, "cpu", dtype)


def test_every_field_of_that_server_is_there_and_none_is_changed_by_what_is_added() -> None:
    answer = answered(tables(2))
    assert set(answer) - FIELDS_OF_THAT_SERVER == {
        "sample_index",
        "request",
        "policy_version",
        "weights_digest",
        "audio",
        "audio_sample_rate",
        "audio_log_probs",
        "kept_step_indices",
    }
    assert set(answer) > FIELDS_OF_THAT_SERVER
    assert (answer["request_id"], answer["prompt"], answer["seed"]) == ("mine", " a red ball", 7)
    assert (answer["sample_index"], answer["policy_version"]) == (2, 3)
    assert answer["inference_time_s"] == 7.0
    for absent in (
        "rollout_debug_tensors",
        "denoising_env",
        "dit_trajectory",
        "peak_memory_mb",
        "kept_step_indices",
    ):
        assert answer[absent] is None


def test_log_probs_are_of_every_step_and_0_where_it_moved_by_ode() -> None:
    answer = answered(tables())
    video, audio = answer["rollout_log_probs"], answer["audio_log_probs"]
    assert video.dtype == audio.dtype == torch.float32
    assert video.tolist() == [*as_float32([-1.25]), 0.0, *as_float32([0.1234567, -3.5])]
    assert audio.tolist() == [0.0] * NUM_STEPS


def test_the_picture_is_from_0_to_1_and_the_sound_is_there() -> None:
    of = tables()
    answer, media = answered(of), read_media(of.media)
    output = answer["generated_output"]
    assert output.dtype == torch.float32 and output.shape == media.frames.shape
    assert output.min() >= 0 and output.max() <= 1
    assert np.array_equal((output.numpy() * np.float32(255)).round().astype(np.uint8), media.frames)
    assert torch.equal(answer["audio"], tensor_of(media.waveform))
    assert answer["audio_sample_rate"] == 48000


def test_states_are_the_columns_of_our_table() -> None:
    of = tables()
    view = read_trajectory(of.trajectory)
    answer = answered(of, rollout_return_dit_trajectory=True)
    trajectory = answer["dit_trajectory"]
    assert torch.equal(trajectory["latents"], tensor_of(view.video_latents))
    assert torch.equal(trajectory["audio_latents"], tensor_of(view.audio_latents))
    assert trajectory["sigmas"].tolist() == as_float32(SIGMAS)
    assert torch.equal(trajectory["timesteps"], trajectory["sigmas"] * 1000)
    assert answer["kept_step_indices"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("indices", [[1, 2], [3, 1, 2], [4], []])
def test_only_the_states_that_were_asked_for_are_returned_in_their_order(indices: list[int]) -> None:
    kept = tuple(sorted({*indices, NUM_STEPS}))  # our own table has the last state in any case
    of = tables(steps=kept)
    view = read_trajectory(of.trajectory)
    answer = answered(of, rollout_return_dit_trajectory=True, rollout_return_step_indices=indices)
    assert answer["kept_step_indices"] == sorted(indices)
    trajectory = answer["dit_trajectory"]
    rows = [view.row_of(step) for step in sorted(indices)]
    assert torch.equal(trajectory["latents"], tensor_of(view.video_latents[rows]))
    assert len(trajectory["timesteps"]) == len(indices) and len(trajectory["sigmas"]) == NUM_STEPS + 1


def test_what_the_transformer_attended_to_is_there_for_both_modalities() -> None:
    of = tables(guided=True, masked=True)
    view = read_conditioning(of.conditioning)
    assert view.negative_video_context is not None
    environment = answered(of, rollout_return_denoising_env=True)["denoising_env"]
    positive, negative = environment["pos_cond_kwargs"], environment["neg_cond_kwargs"]
    assert torch.equal(positive["encoder_hidden_states"], tensor_of(view.video_context))
    assert torch.equal(positive["audio_encoder_hidden_states"], tensor_of(view.audio_context))
    assert torch.equal(negative["encoder_hidden_states"], tensor_of(view.negative_video_context))
    assert positive["encoder_attention_mask"].tolist() == [1, 1, 0]
    assert negative["audio_encoder_attention_mask"].tolist() == [1, 1, 1]
    assert environment["image_kwargs"] == {"encoder_hidden_states_image": None}
    assert environment["guidance"] is None and environment["guidance_scale"] == 3.0
    assert (environment["height"], environment["width"]) == (4, 6)
    assert (environment["num_frames"], environment["fps"]) == (9, 24.0)


def test_where_all_tokens_are_attended_to_there_is_no_mask_and_without_guidance_no_negative_prompt() -> None:
    environment = answered(tables(), rollout_return_denoising_env=True)["denoising_env"]
    assert environment["pos_cond_kwargs"]["encoder_attention_mask"] is None
    assert environment["neg_cond_kwargs"] is None


def test_an_evaluation_has_its_pictures_alone() -> None:
    answer = answered(tables(), rollout=False)
    assert answer["rollout_log_probs"] is None and answer["audio_log_probs"] is None
    assert answer["generated_output"].shape == (9, 4, 6, 3)


def test_bfloat16_arrives_as_bfloat16() -> None:
    of = tables(state_dtype="bfloat16", context_dtype="bfloat16")
    answer = answered(of, rollout_return_dit_trajectory=True, rollout_return_denoising_env=True)
    latents = answer["dit_trajectory"]["latents"]
    view = read_trajectory(of.trajectory)
    assert latents.dtype == torch.bfloat16
    assert torch.equal(latents, tensor_of(view.video_latents, "bfloat16"))
    assert answer["denoising_env"]["pos_cond_kwargs"]["encoder_hidden_states"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(6, dtype=torch.float32).reshape(2, 3),
        torch.zeros(0, 3, 4),
        torch.tensor(6.5),
        torch.arange(300, dtype=torch.uint8),
        torch.arange(70_000, dtype=torch.int64),
        torch.randn(5, 7).to(torch.float16),
        torch.randn(5, 7).to(torch.bfloat16),
    ],
    ids=lambda values: f"{values.dtype} {list(values.shape)}",
)
def test_a_tensor_is_written_as_that_server_writes_it(values: torch.Tensor) -> None:
    name = str(values.dtype).removeprefix("torch.")
    bits = values.view(torch.uint16) if values.dtype == torch.bfloat16 else values
    theirs = {
        "__tensor__": True,
        "data": safetensors.torch.save({"t": values}),
        "shape": list(values.shape),
        "dtype": str(values.dtype),
    }
    plain = {"a": 1, "b": [None, True, 0.5, "text"]}
    ours = b"".join(pieces([{**plain, "t": tensor(bits.numpy(), name)}]))
    assert ours == msgpack.packb([{**plain, "t": theirs}])


def test_a_large_tensor_comes_in_pieces_and_is_made_as_it_is_written() -> None:
    made: list[int] = []

    def parts() -> Any:
        for number in range(4):
            made.append(number)
            yield np.full(PIECE_BYTES // 2, number, np.float32)  # two pieces each

    written = pieces(WireTensor(dtype="float32", shape=(4 * PIECE_BYTES // 2,), parts=parts))
    sizes = []
    for piece in written:
        sizes.append(len(piece))
        assert len(made) <= len(sizes)
    assert max(sizes) < 2 * PIECE_BYTES and made == [0, 1, 2, 3]


def test_what_msgpack_cannot_hold_is_refused_before_the_first_piece() -> None:
    vast = WireTensor(dtype="float32", shape=(2**30,), parts=lambda: iter(()))
    with pytest.raises(ValueError, match="less than 4 GiB"):
        pieces([{"latents": vast}])
