"""SGLang's routes over an archive that is none and weights that are none: chains, refusals, and paths."""

import asyncio
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from cards import ltx23_card
from fastapi import FastAPI
from openapi import NOT_SAID, explore
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from sglang_tables import Tables, read_answer, tables

from configs.settings import HttpSettings
from deployments.http.api import http_app
from deployments.kept.api import SampleProgress, Settled, Submitted
from deployments.sglang.api import sglang_router
from schemas.control import Control, Fleet, ReplicaState
from schemas.errors import Problem
from schemas.resolve import resolve

GENERATE = "/rollout/generate"
DIGEST = "ab" * 16


class Ref:
    """Awaited for its value, any number of times."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        return self._value


class FakeArchive:
    """Samples tables out of thin air; ``fails`` by sample index."""

    def __init__(self, fails: dict[int, Problem] | None = None) -> None:
        self._fails = fails or {}
        self.asked: list[dict[str, Any]] = []
        self.made: list[Tables] = []
        self.waiting = 0
        self.hold = asyncio.Event()
        self.hold.set()

    async def submit(self, request: dict[str, Any], *, from_http: bool = True) -> Submitted:
        self.asked.append(request)
        resolved = resolve(request, ltx23_card())
        return {"id": "mine", "group_id": "g", "request": resolved.model_dump(mode="json")}

    async def wait(self, id: str, group_id: str | None = None) -> Settled:
        self.waiting += 1
        try:
            await self.hold.wait()
        finally:
            self.waiting -= 1
        request = resolve(self.asked[-1], ltx23_card())
        self.made = [
            tables(index, steps=(0, 1, 2, 3, 4), guided=request.guidance.needs_negative_prompt)
            for index in range(request.num_samples)
        ]
        return {
            "id": id,
            "group_id": "g",
            "request": request.model_dump(mode="json"),
            "policy_version": 3,
            "conditioning": Ref(self.made[0].conditioning),
            "samples": [
                {
                    "sample_index": index,
                    "attempt": 1,
                    "trajectory": Ref(made.trajectory) if request.trajectory else None,
                    "media": Ref(made.media),
                    "problem": self._fails[index].payload() if index in self._fails else None,
                }
                for index, made in enumerate(self.made)
            ],
        }

    async def find(self, id: str) -> Submitted:
        raise AssertionError

    async def progress(
        self, id: str, group_id: str, seen: list[SampleProgress] | None
    ) -> list[SampleProgress]:
        raise AssertionError

    async def cancel(self, id: str) -> None:
        raise AssertionError


class FakeWeights:
    """Two replicas at version 3."""

    def __init__(self) -> None:
        self.version, self.run = 3, "running"
        self.digests = [DIGEST, DIGEST]
        self.published: list[tuple[int, Path]] = []
        self.error: Exception | None = None

    def _states(self) -> list[ReplicaState]:
        return [
            ReplicaState(replica_id=f"r{i}", version=self.version, weights_digest=digest, run=self.run)  # type: ignore[arg-type]
            for i, digest in enumerate(self.digests)
        ]

    def publish_weights(self, *, version: int, path: str | Path) -> list[ReplicaState]:
        if self.error is not None:
            raise self.error
        self.published.append((version, Path(path)))
        self.version = version
        return self._states()

    def policy_version(self) -> Fleet:
        return Fleet(control=Control(version=self.version), replicas=tuple(self._states()))

    def sleep(self) -> list[ReplicaState]:
        if self.error is not None:
            raise self.error
        self.run = "asleep"
        return self._states()

    def wake(self) -> list[ReplicaState]:
        self.run = "running"
        return self._states()


def post(
    url: str,
    body: Any = None,
    *,
    archive: FakeArchive | None = None,
    weights: FakeWeights | None = None,
    root: Path | None = None,
) -> httpx.Response:
    """What an app of these parts answers. Bytes are sent as they are."""

    async def ask() -> httpx.Response:
        app = app_of(archive or FakeArchive(), weights or FakeWeights(), root)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://app"
        ) as http:
            given = {"content": body} if isinstance(body, bytes) else {"json": body}
            return await http.post(url, **given)

    return asyncio.run(ask())


def app_of(archive: FakeArchive, weights: FakeWeights, root: Path | None = None) -> FastAPI:
    async def fleet() -> Fleet:
        return weights.policy_version()

    weights_root = None if root is None else str(root)
    router = sglang_router(archive, weights, max_num_samples=4, weights_root=weights_root)
    return http_app(archive, fleet, checkpoint="tiny", settings=HttpSettings(), routers=[router])


def saved(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ("diffusion_pytorch_model.safetensors",):
        (folder / name).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return folder


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


def test_an_evaluation_returns_no_states_and_fetches_none() -> None:
    (sample,) = read_answer(post(GENERATE, {"prompt": "a", "rollout": False}).content)
    assert sample["generated_output"].shape == (9, 4, 6, 3)
    assert sample["rollout_log_probs"] is None and sample["dit_trajectory"] is None


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
            while not archive.waiting:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert archive.waiting == 0

    asyncio.run(hang_up())


def test_the_document_says_what_may_be_asked_and_answered() -> None:
    document = app_of(FakeArchive(), FakeWeights()).openapi()
    generate = document["paths"][GENERATE]["post"]
    fields = generate["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"prompt", "rollout_sde_type", "rollout_audio_sde_type"} <= set(fields)
    assert set(generate["responses"]) >= {"200", "401", "410", "413", "422", "503", "504"}
    assert "application/msgpack" in generate["responses"]["200"]["content"]


@pytest.mark.parametrize("form", ["a checkpoint", "its transformer", "a file", "relative", "shards"])
def test_weights_are_published_from_a_folder_under_the_root(tmp_path: Path, form: str) -> None:
    root = tmp_path / "weights"
    folder = saved(root / "step-400" / "transformer")
    if form == "shards":
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "diffusion_pytorch_model.safetensors"}})
        )
    given, expected = {
        "a checkpoint": (folder.parent, folder),
        "its transformer": (folder, folder),
        "a file": (folder / "diffusion_pytorch_model.safetensors",) * 2,
        "relative": (Path("step-400"), folder),
        "shards": (folder, folder),
    }[form]
    weights = FakeWeights()
    body = {"model_path": str(given), "flush_cache": True, "target_modules": ["transformer"]}
    answer = post("/update_weights_from_disk", body, weights=weights, root=root)
    assert answer.status_code == 200
    assert weights.published == [(4, expected)]
    assert answer.json()["success"] is True and "2 replicas" in answer.json()["message"]
    assert (answer.json()["policy_version"], answer.json()["weights_digest"]) == (4, DIGEST)


def test_the_next_version_may_be_named(tmp_path: Path) -> None:
    weights = FakeWeights()
    body = {"model_path": str(saved(tmp_path / "w")), "version": 9}
    assert (
        post("/update_weights_from_disk", body, weights=weights, root=tmp_path).json()["policy_version"] == 9
    )


def test_no_path_leads_out_of_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "weights", saved(tmp_path / "outside")
    root.mkdir()
    (root / "link").symlink_to(outside)
    saved(root / "linked file")
    (root / "linked file" / "other.safetensors").symlink_to(outside / "diffusion_pytorch_model.safetensors")
    (root / "checkpoint").mkdir()
    (root / "checkpoint" / "transformer").symlink_to(outside)
    saved(root / "indexed")
    (root / "indexed" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../../outside/diffusion_pytorch_model.safetensors"}})
    )
    (root / "circle").symlink_to(root / "circle")
    weights = FakeWeights()
    for path in (
        str(outside),
        "../outside",
        str(root / ".." / "outside"),
        "/etc/passwd",
        "/nowhere",
        "link",
        "linked file",
        "checkpoint",
        "indexed",
        "circle",
        f"{root}-sibling",
    ):
        answer = post("/update_weights_from_disk", {"model_path": path}, weights=weights, root=root)
        assert answer.status_code == 400, path
        assert "http.weights_root" in answer.json()["rule"] and answer.json()["field"] == "model_path", path
    assert weights.published == []


def test_links_within_the_root_are_followed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "blobs")
    (tmp_path / "latest").symlink_to(folder)
    weights = FakeWeights()
    assert post(
        "/update_weights_from_disk", {"model_path": "latest"}, weights=weights, root=tmp_path
    ).is_success
    assert weights.published[0][1] == folder


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({}, "model_path", "required"),
        ({"model_path": ""}, "model_path", "at least 1"),
        ({"model_path": "a\0b"}, "model_path", "NUL"),
        ({"model_path": "nothing here"}, "model_path", ".safetensors file"),
        ({"model_path": "empty"}, "model_path", ".safetensors file"),
        ({"model_path": "bad index"}, "model_path", "index"),
        ({"model_path": "w", "target_modules": ["vae"]}, "target_modules", "only the policy"),
        ({"model_path": "w", "target_module": ["vae"]}, "target_module", "did you mean target_modules"),
        ({"model_path": "w", "version": 0}, "version", "at least 1"),
        (b"{", "body", "JSON"),
    ],
)
def test_what_cannot_be_published_is_told_in_that_servers_form(
    tmp_path: Path, body: Any, field: str, said: str
) -> None:
    saved(tmp_path / "w")
    (tmp_path / "empty").mkdir()
    (saved(tmp_path / "bad index") / "model.safetensors.index.json").write_text("[]")
    weights = FakeWeights()
    answer = post("/update_weights_from_disk", body, weights=weights, root=tmp_path)
    assert answer.status_code == 400 and weights.published == []
    told = answer.json()
    assert told["success"] is False and told["field"] == field and said in told["message"]


def test_without_a_root_no_path_is_read(tmp_path: Path) -> None:
    answer = post("/update_weights_from_disk", {"model_path": str(saved(tmp_path / "w"))})
    assert answer.status_code == 400 and "http.weights_root" in answer.json()["remedy"]


@pytest.mark.parametrize(
    ("error", "status", "field"),
    [
        (Problem(code="weights_refused", field="path", rule="must be whole").exception(), 400, "model_path"),
        (Problem(code="deadline_exceeded", rule="was not done in time").exception(), 504, None),
        (OSError("disk on fire"), 500, None),
    ],
)
def test_a_publication_that_fails_is_told_in_that_servers_form(
    tmp_path: Path, error: Exception, status: int, field: str | None
) -> None:
    weights = FakeWeights()
    weights.error = error
    body = {"model_path": str(saved(tmp_path / "w"))}
    answer = post("/update_weights_from_disk", body, weights=weights, root=tmp_path)
    assert answer.status_code == status
    assert answer.json()["success"] is False and answer.json()["field"] == field
    assert "fire" not in answer.text


def test_checksums_are_the_fleets_digests() -> None:
    assert post("/get_weights_checksum", {}).json() == {"transformer": DIGEST}
    assert post("/get_weights_checksum", b"").json() == {"transformer": DIGEST}
    answer = post("/get_weights_checksum", {"module_names": ["vae", "transformer"]})
    assert answer.json() == {"vae": "not_found", "transformer": DIGEST}


@pytest.mark.parametrize("digests", [[DIGEST, "cd" * 16], []])
def test_replicas_that_do_not_agree_have_no_checksum(digests: list[str]) -> None:
    weights = FakeWeights()
    weights.digests = digests
    answer = post("/get_weights_checksum", {"module_names": None}, weights=weights)
    assert answer.status_code == 503 and answer.json()["success"] is False


def test_a_replica_that_is_heard_of_late_is_waited_for() -> None:
    class Late(FakeWeights):
        calls = 0

        def policy_version(self) -> Fleet:
            self.calls += 1
            self.version = 2 if self.calls < 3 else 3
            return super().policy_version().model_copy(update={"control": Control(version=3)})

    answer = post("/get_weights_checksum", {}, weights=Late())
    assert answer.json() == {"transformer": DIGEST}


def test_memory_is_released_and_resumed_and_twice_is_once() -> None:
    weights = FakeWeights()
    for _ in range(2):
        answer = post("/release_memory_occupation", weights=weights)
        assert answer.json()["success"] is True and answer.json()["sleeping"] is True
        assert weights.run == "asleep"
    for _ in range(2):
        answer = post("/resume_memory_occupation", b"", weights=weights)
        assert answer.json()["success"] is True and answer.json()["sleeping"] is False
        assert weights.run == "running"


@pytest.mark.parametrize("route", ["update_weights_from_tensor", "update_weights_from_tensor_checker"])
def test_tensors_over_http_are_refused_with_the_way_that_works(route: str) -> None:
    answer = post(f"/{route}", {"serialized_named_tensors": ["..."]})
    assert answer.status_code == 501
    assert answer.json()["success"] is False and "publish_weights" in answer.json()["remedy"]


DOCUMENT = schemathesis.openapi.from_asgi(
    "/openapi.json", app_of(FakeArchive(), FakeWeights(), Path("/nowhere"))
)
OPERATIONS = {
    label: found.ok()
    for found in DOCUMENT.get_all_operations()
    if not (label := found.ok().label).partition(" ")[2].startswith(("/v1", "/health"))
}


@pytest.mark.parametrize("label", OPERATIONS)
def test_no_answer_is_undocumented(label: str) -> None:
    """Nor a fault of ours, but for 501, which is documented as what those routes are."""
    excluded = [*NOT_SAID, not_a_server_error] if "tensor" in label else NOT_SAID
    # Without a body nothing can be wrong.
    modes = GenerationMode if OPERATIONS[label].body else [GenerationMode.POSITIVE]
    explore(
        OPERATIONS[label],
        lambda case: case.call_and_validate(excluded_checks=excluded),
        modes=modes,
        max_examples=20,
    )
