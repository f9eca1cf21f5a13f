"""Tables give back what was packed: the same bits, at the same addresses, read-only."""

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.arrow import (
    NUMPY_DTYPES,
    manifest_of,
    read_numbers,
    read_tensor,
    table_of,
    tensor_column,
    torch_dtype_of,
)
from schemas.conditioning import pack_conditioning, read_conditioning
from schemas.media import pack_media, read_media
from schemas.trajectory import SCHEMA_VERSION, TrajectoryView, pack_trajectory, read_trajectory

RNG = np.random.default_rng(0)


def _bits(shape: tuple[int, ...], torch_dtype: str = "float32") -> Any:
    dtype = np.dtype(NUMPY_DTYPES[torch_dtype])
    return np.frombuffer(RNG.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _same_bits(left: Any, right: Any) -> bool:
    same_kind = left.shape == right.shape and left.dtype == right.dtype
    return bool(same_kind and left.tobytes() == right.tobytes())


def _from_wire(table: pa.Table) -> tuple[pa.Table, pa.Buffer]:
    """The table as another process reads it: over a buffer of IPC bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    buffer = sink.getvalue()
    return pa.ipc.open_stream(buffer).read_all(), buffer


def _trajectory(
    state_dtype: str = "float32", steps: tuple[int, ...] = (0, 1, 3, 6)
) -> tuple[pa.Table, Any, Any]:
    rows = len(steps)
    video, audio = _bits((rows, 12, 8), state_dtype), _bits((rows, 9, 4), state_dtype)
    table = pack_trajectory(
        steps=steps,
        sigmas=np.linspace(1, 0, rows).tolist(),
        video_latents=video,
        audio_latents=audio,
        log_prob_video=[-0.5, *[None] * (rows - 1)],
        log_prob_audio=[None] * rows,
        state_dtype=state_dtype,
        manifest={"seed": 7, "schema_version": -1},
    )
    return table, video, audio


@pytest.mark.parametrize("state_dtype", ["float32", "float16", "bfloat16"])
def test_a_trajectory_is_packed_and_read_without_a_copy(state_dtype: str) -> None:
    table, video, audio = _trajectory(state_dtype)
    view = read_trajectory(table)
    for read, packed in ((view.video_latents, video), (view.audio_latents, audio)):
        assert _same_bits(read, packed)
        assert _address(read) == _address(packed)
    assert view.state_dtype == state_dtype


def test_a_trajectory_from_another_process_is_read_inside_its_buffer() -> None:
    table, buffer = _from_wire(_trajectory()[0])
    view = read_trajectory(table)
    for array in (view.steps, view.sigmas, view.video_latents, view.audio_latents):
        assert buffer.address <= _address(array) < buffer.address + buffer.size
        assert _address(array) + array.nbytes <= buffer.address + buffer.size


def test_what_is_read_is_read_only() -> None:
    view = read_trajectory(_trajectory()[0])
    for array in (view.steps, view.sigmas, view.video_latents, view.audio_latents):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_slice_is_read_without_a_copy_too() -> None:
    table, video, audio = _trajectory()
    view = read_trajectory(table.slice(1, 2))
    assert view.steps.tolist() == [1, 3]
    assert view.log_prob_video == (None, None)
    assert _same_bits(view.video_latents, video[1:3])
    assert _address(view.video_latents) == _address(video[1:3])
    assert _address(view.audio_latents) == _address(audio[1:3])


def test_a_view_keeps_its_table_alive() -> None:
    table, _ = _from_wire(_trajectory()[0])
    latents = read_trajectory(table).video_latents
    before = latents.tobytes()
    del table
    pa.default_memory_pool().release_unused()
    assert latents.tobytes() == before


def test_the_rest_of_a_trajectory_comes_back_equal() -> None:
    view = read_trajectory(pickle.loads(pickle.dumps(_trajectory()[0])))
    assert isinstance(view, TrajectoryView)
    assert view.steps.tolist() == [0, 1, 3, 6]
    assert view.steps.dtype == np.int32
    assert view.sigmas.tolist() == np.linspace(1, 0, 4).astype(np.float32).tolist()
    assert view.sigmas.dtype == np.float32
    assert view.log_prob_video == (-0.5, None, None, None)
    assert view.log_prob_audio == (None, None, None, None)
    assert view.manifest == {"seed": 7, "schema_version": SCHEMA_VERSION}


def test_pyarrow_alone_can_read_a_trajectory() -> None:
    table, video, _ = _trajectory("bfloat16")
    assert table.column_names == [
        "step",
        "sigma",
        "video_latents",
        "audio_latents",
        "log_prob_video",
        "log_prob_audio",
    ]
    assert table.schema.field("video_latents").metadata == {b"torch_dtype": b"bfloat16"}
    assert table["log_prob_video"].null_count == 3
    assert np.array_equal(table["video_latents"].chunk(0).to_numpy_ndarray(), video)


def test_a_state_that_was_not_kept_is_refused_with_those_that_were() -> None:
    view = read_trajectory(_trajectory()[0])
    assert [view.row_of(step) for step in (0, 1, 3, 6)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"state 2 was not kept, only \[0, 1, 3, 6\] were"):
        view.row_of(2)


def test_a_trajectory_of_another_version_is_refused() -> None:
    table = _trajectory()[0]
    later = table.replace_schema_metadata({b"manifest": b'{"schema_version": 2}'})
    with pytest.raises(ValueError, match="schema_version must be 1, got 2"):
        read_trajectory(later)


def test_tables_in_several_chunks_are_refused_rather_than_copied() -> None:
    table = pa.concat_tables([_trajectory()[0], _trajectory()[0]])
    with pytest.raises(ValueError, match=r"in one chunk .* but has 2"):
        read_trajectory(table)
    assert len(read_trajectory(table.combine_chunks()).steps) == 8


def test_columns_and_manifests_that_are_not_there_are_named() -> None:
    bare = pa.table({"a": [1, 2]})
    with pytest.raises(ValueError, match="must have a manifest"):
        manifest_of(bare)
    with pytest.raises(ValueError, match="must have a column b, but has a"):
        read_tensor(bare, "b")
    with pytest.raises(ValueError, match="column a must hold tensors"):
        read_tensor(bare, "a")
    with pytest.raises(ValueError, match="column a must name its torch_dtype"):
        torch_dtype_of(bare, "a")
    assert read_numbers(bare, "a").tolist() == [1, 2]


def test_a_manifest_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        table_of([tensor_column("a", _bits((1, 2)), "float32")], {"loss": float("nan")})


@pytest.mark.parametrize("with_negative", [False, True])
def test_a_conditioning_comes_back_at_the_same_addresses(with_negative: bool) -> None:
    contexts = {"video_context": _bits((5, 8), "bfloat16"), "audio_context": _bits((5, 4), "bfloat16")}
    mask = np.array([1, 1, 1, 0, 0], bool)
    negative: dict[str, Any] = {}
    if with_negative:
        negative = {f"negative_{name}": _bits(a.shape, "bfloat16") for name, a in contexts.items()}
        negative["negative_text_mask"] = ~mask
    table = pack_conditioning(
        **contexts, text_mask=mask, **negative, torch_dtype="bfloat16", manifest={"digest": "d"}
    )
    assert table.num_rows == 1
    view = read_conditioning(table)
    for name, packed in {**contexts, **negative, "text_mask": mask}.items():
        read = getattr(view, name)
        assert np.array_equal(read, packed)
        assert _address(read) == _address(packed)
        assert not read.flags.writeable
    assert view.text_mask.dtype == np.uint8
    assert (view.torch_dtype, view.manifest) == ("bfloat16", {"digest": "d"})
    assert (view.negative_video_context is None) == (not with_negative)
    assert (view.negative_text_mask is None) == (not with_negative)


def test_media_come_back_at_the_same_addresses() -> None:
    frames, waveform = _bits((9, 4, 6, 3), "uint8"), _bits((2, 100))
    media = pack_media(frames, 24.0, waveform, 48000, {"seed": 7})
    assert {name: table.num_rows for name, table in media.items()} == {"video": 9, "audio": 1}
    view = read_media(media)
    for read, packed in ((view.frames, frames), (view.waveform, waveform)):
        assert _same_bits(read, packed)
        assert _address(read) == _address(packed)
        assert not read.flags.writeable
    assert (view.frame_rate, view.sample_rate) == (24.0, 48000)
    assert view.manifest == {"seed": 7, "frame_rate": 24.0}


def test_media_without_audio_are_refused() -> None:
    media = pack_media(_bits((1, 2, 2, 3), "uint8"), 24.0, _bits((2, 4)), 48000, {})
    with pytest.raises(ValueError, match="audio is missing"):
        read_media({"video": media["video"]})


@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple),
    torch_dtype=st.sampled_from(sorted(NUMPY_DTYPES)),
    data=st.data(),
)
def test_any_bits_come_back_through_the_wire_and_a_slice(
    shape: tuple[int, ...], torch_dtype: str, data: st.DataObject
) -> None:
    values = _bits(shape, torch_dtype)
    start = data.draw(st.integers(0, shape[0] - 1))
    table, _ = _from_wire(table_of([tensor_column("x", values, torch_dtype)], {}))
    assert _same_bits(read_tensor(table, "x"), values)
    assert _same_bits(read_tensor(table.slice(start), "x"), values[start:])
    assert torch_dtype_of(table, "x") == torch_dtype


def test_an_array_that_is_not_contiguous_is_packed_by_a_copy() -> None:
    values = _bits((4, 3, 2)).transpose(1, 0, 2)
    table = table_of([tensor_column("x", values, "float32")], {})
    assert _same_bits(read_tensor(table, "x"), np.ascontiguousarray(values))
