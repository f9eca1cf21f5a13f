"""The formulas against float32 records of public implementations (SGLang, UniRL, ltx-core)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.noise import draw, noise_key
from pipeline.schedule import sigma_grid
from pipeline.transitions import transition

GOLDEN = json.loads((Path(__file__).parent / "golden" / "transitions.json").read_text())


def _name(record: dict[str, Any]) -> str:
    return f"{record['kind']}-{record['noise_level']}-step{record['step_index']}of{record['num_steps']}"


def _tensor(record: dict[str, Any], key: str) -> torch.Tensor:
    return torch.tensor(record[key], dtype=torch.float32).reshape(record["shape"])


def _move(record: dict[str, Any], **given: Any) -> Any:
    return transition(
        record["kind"],
        _tensor(record, "sample"),
        _tensor(record, "velocity"),
        sigma=record["sigma"],
        sigma_next=record["sigma_next"],
        sigma_1=record["sigma_1"],
        noise_level=record["noise_level"],
        log_prob_kind="density" if record["density"] else "squared_error",
        **given,
    )


STOCHASTIC = [r for r in GOLDEN["transitions"] if r["std"] > 0]
DETERMINISTIC = [r for r in GOLDEN["transitions"] if r["kind"] == "ode"]


@pytest.mark.parametrize("record", STOCHASTIC, ids=_name)
def test_a_stochastic_transition_equals_its_record(record: dict[str, Any]) -> None:
    move = _move(record, noise=_tensor(record, "noise"))
    torch.testing.assert_close(move.mean, _tensor(record, "mean"), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(move.std, torch.full((2,), record["std"]), rtol=1e-6, atol=0)
    torch.testing.assert_close(move.next_sample, _tensor(record, "next"), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(move.log_prob, torch.tensor(record["log_prob_mean"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("record", STOCHASTIC, ids=_name)
def test_scoring_the_next_state_gives_the_bits_of_sampling_it(record: dict[str, Any]) -> None:
    sampled = _move(record, noise=_tensor(record, "noise"))
    scored = _move(record, next_sample=sampled.next_sample)
    assert torch.equal(sampled.log_prob, scored.log_prob)


@pytest.mark.parametrize("record", DETERMINISTIC, ids=_name)
def test_an_ode_step_equals_its_record_and_has_no_log_prob(record: dict[str, Any]) -> None:
    move = _move(record)
    torch.testing.assert_close(move.next_sample, _tensor(record, "next"), rtol=1e-6, atol=1e-6)
    assert move.log_prob is None and not move.std.any()


def test_cps_at_its_last_step_is_an_error_and_its_mean_is_the_record() -> None:
    (record,) = [r for r in GOLDEN["transitions"] if r["kind"] == "cps" and r["std"] == 0]
    with pytest.raises(ValueError, match="std 0"):
        _move(record, noise=_tensor(record, "noise"))
    # The record's own mean is the Euler step to sigma 0, which is how such a step moves here.
    euler = transition(
        "ode",
        _tensor(record, "sample"),
        _tensor(record, "velocity"),
        sigma=record["sigma"],
        sigma_next=0.0,
        sigma_1=record["sigma_1"],
        noise_level=0.0,
    )
    torch.testing.assert_close(euler.next_sample, _tensor(record, "mean"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("record", GOLDEN["sigma_grids"], ids=lambda r: f"{r['num_steps']}-{r['tokens']}")
def test_a_sigma_grid_equals_its_record(record: dict[str, Any]) -> None:
    shift = "constant" if record["tokens"] is None else "tokens"
    grid = sigma_grid(record["num_steps"], shift=shift, num_tokens=record["tokens"])
    assert grid.dtype == torch.float32
    torch.testing.assert_close(grid, torch.tensor(record["sigmas"]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("record", GOLDEN["noise"], ids=lambda r: r["key"])
def test_keyed_noise_equals_its_record_exactly(record: dict[str, Any]) -> None:
    seed, sample_index, modality, step = record["key"].split("/")
    key = noise_key(int(seed), int(sample_index), modality, step if step == "init" else int(step))
    assert key == record["generator_seed"]
    noise = draw(key, tuple(record["shape"]))
    assert noise.flatten()[:8].tolist() == record["first"]


def test_drawing_noise_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    draw(noise_key(1, "shared", "audio", "init"), (4, 4))
    assert torch.equal(before, torch.get_rng_state())
