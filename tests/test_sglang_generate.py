"""A group by SGLang's route: answered as that server's trainers read it, or refused in their words."""

import asyncio
from typing import Any

import httpx
import pytest

from schemas.errors import Problem
from tests.patience import PATIENCE_S, soon
from tests.sglang_apps import GENERATE, FakeArchive, FakeWeights, app_of, post
from tests.sglang_tables import read_answer


def test_a_group_is_answered_as_that_servers_trainers_read_it() -> None:
    archive = FakeArchive()
    answer = post(
        GENERATE,
        {
            "prompt": "a red ball",
            "seed": 7,
            "num_outputs_per_prompt": 2,
            "rollout_return_dit_trajectory": True,
            "rollout_return_denoising_env": True,
        },
        archive=archive,
    )
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/msgpack"
    assert archive.asked[0]["num_samples"] == 2 and archive.asked[0]["return_steps"] == "all"
    samples = read_answer(answer.content)
    assert [sample["sample_index"] for sample in samples] == [0, 1]
    for sample, made in zip(samples, archive.made, strict=True):
        latents = made.trajectory.column("video_latents").chunk(0).to_numpy_ndarray()
        assert (sample["dit_trajectory"]["latents"].numpy() == latents).all()
        context = made.conditioning.column("video_context").chunk(0).to_numpy_ndarray()
        if sample["sample_index"] == 0:
            env = sample["denoising_env"]["pos_cond_kwargs"]
            assert (env["encoder_hidden_states"].numpy() == context[0]).all()


@pytest.mark.parametrize(
    "asked", [{}, {"rollout_return_dit_trajectory": True, "rollout_return_denoising_env": True}]
)
def test_an_evaluation_returns_no_states_and_fetches_none(asked: dict[str, bool]) -> None:
    archive = FakeArchive()
    answer = post(GENERATE, {"prompt": "a", "rollout": False, **asked}, archive=archive)
    (sample,) = read_answer(answer.content)
    assert sample["generated_output"].shape == (9, 4, 6, 3)
    assert sample["rollout_log_probs"] is None and sample["dit_trajectory"] is None
    assert sample["denoising_env"] is None and sample["kept_step_indices"] is None

    assert archive.asked[0]["trajectory"] is False, "no states are kept"
    assert archive.settled is not None
    (settled,) = archive.settled["samples"]
    assert settled["media"].is_fetched and not archive.settled["conditioning"].is_fetched


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"prompt": "a", "num_outputs_per_prompt": 5}, "num_outputs_per_prompt", "at most 4"),
        ({"prompt": "a", "num_frames": 120}, "num_frames", "8k + 1"),
        ({"prompt": "a", "image_path": ["cat.png"]}, "image_path", "prompt and noise"),
        ({"prompt": "a", "rollout_sde_step_indices": [99]}, "rollout_sde_step_indices", "from 0 to 5"),
        ({"seed": 3}, "prompt", "required"),
        (b"", "prompt", "required"),
        (b"{", "body", "must be JSON"),
        (b"[" * 100_000, "body", "must be JSON"),
        (b'{"prompt": "\\ud800"}', "prompt", "Unicode"),
        ([1], None, "must be a JSON object"),
    ],
)
def test_what_cannot_be_sampled_is_told_in_the_callers_words(body: Any, field: str | None, said: str) -> None:
    answer = post(GENERATE, body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == "invalid_request" and (problem["field"] or "").startswith(field or "")
    assert said in problem["rule"] and said in problem["detail"]


def test_a_group_with_a_failed_sample_is_an_error_and_not_a_shorter_list() -> None:
    failure = Problem(code="non_finite", field="sigmas", rule="must be finite")
    answer = post(
        GENERATE, {"prompt": "a", "num_outputs_per_prompt": 3}, archive=FakeArchive(fails={1: failure})
    )
    assert answer.status_code == 500 and answer.json()["code"] == "non_finite"


def test_who_hangs_up_no_longer_waits() -> None:
    async def hang_up() -> None:
        archive = FakeArchive()
        archive.hold.clear()
        transport = httpx.ASGITransport(app_of(archive, FakeWeights()))
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
            call = asyncio.create_task(http.post(GENERATE, json={"prompt": "a"}))
            await soon(lambda: archive.waiting)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(call, PATIENCE_S)
        assert archive.waiting == 0

    asyncio.run(hang_up())
