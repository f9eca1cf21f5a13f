"""Properties of a transition that hold for every kind. Its values are held to records in test_golden_numerics.py."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.transitions import is_deterministic, transition

STOCHASTIC = [("sde", 0.7), ("dance", 0.3), ("cps", 0.8)]
SIGMAS = torch.tensor([1.0, 0.9, 0.6, 0.25, 0.1])
"""Noise levels of five rows at five different steps."""
SIGMAS_NEXT = torch.tensor([0.9, 0.6, 0.25, 0.1, 0.05])
SIGMA_1 = 0.9


def rows(seed: int, num_rows: int = 5) -> Tensor:
    return torch.randn(num_rows, 7, 3, generator=torch.Generator().manual_seed(seed))


def move(kind: Any, noise_level: float, **changes: Any) -> Any:
    """Five rows at five steps, unless ``changes`` say otherwise."""
    given = {
        "sample": rows(0),
        "velocity": rows(1),
        "sigma": SIGMAS,
        "sigma_next": SIGMAS_NEXT,
        "sigma_1": SIGMA_1,
        "noise_level": noise_level,
        **changes,
    }
    return transition(kind, given.pop("sample"), given.pop("velocity"), **given)


@pytest.mark.parametrize(("kind", "level"), [*STOCHASTIC, ("ode", 0.0)])
def test_a_row_moves_as_it_would_alone_with_a_scalar_sigma(kind: str, level: float) -> None:
    noise = None if kind == "ode" else rows(2)
    together = move(kind, level, noise=noise)
    for i in range(5):
        alone = move(
            kind,
            level,
            sample=rows(0)[i : i + 1],
            velocity=rows(1)[i : i + 1],
            sigma=float(SIGMAS[i]),
            sigma_next=float(SIGMAS_NEXT[i]),
            noise=None if noise is None else noise[i : i + 1],
        )
        assert torch.equal(alone.next_sample[0], together.next_sample[i])
        assert torch.equal(alone.mean[0], together.mean[i])
        assert torch.equal(alone.std[0], together.std[i])
        if noise is not None:
            assert torch.equal(alone.log_prob[0], together.log_prob[i])


@pytest.mark.parametrize(("kind", "level"), STOCHASTIC)
@pytest.mark.parametrize("log_prob_kind", ["density", "squared_error"])
@pytest.mark.parametrize("storage_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scoring_what_was_stored_gives_the_bits_of_sampling_it(
    kind: str, level: float, log_prob_kind: str, storage_dtype: torch.dtype
) -> None:
    options = {"log_prob_kind": log_prob_kind, "sample": rows(0).to(storage_dtype)}
    sampled = move(kind, level, noise=rows(2), storage_dtype=storage_dtype, **options)
    assert sampled.next_sample.dtype == storage_dtype
    scored = move(kind, level, next_sample=sampled.next_sample, **options)
    assert torch.equal(scored.log_prob, sampled.log_prob)
    assert torch.equal(scored.mean, sampled.mean)
    assert scored.next_sample is sampled.next_sample


@pytest.mark.parametrize(("kind", "level"), STOCHASTIC)
def test_the_log_prob_is_that_of_the_rounded_state(kind: str, level: float) -> None:
    exact, rounded = (
        move(kind, level, noise=rows(2), storage_dtype=d) for d in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(rounded.next_sample, exact.next_sample.bfloat16())
    normal = torch.distributions.Normal(rounded.mean.double(), rounded.std.double().view(-1, 1, 1))
    expected = normal.log_prob(rounded.next_sample.double()).mean(dim=(1, 2))
    torch.testing.assert_close(rounded.log_prob.double(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(rounded.log_prob, exact.log_prob)


@pytest.mark.parametrize(("kind", "level"), STOCHASTIC)
def test_squared_error_is_the_distance_to_the_mean_alone(kind: str, level: float) -> None:
    sampled = move(kind, level, noise=rows(2), log_prob_kind="squared_error")
    expected = -((sampled.next_sample - sampled.mean) ** 2).mean(dim=(1, 2))
    torch.testing.assert_close(sampled.log_prob, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("kind", "level"), [*STOCHASTIC, ("ode", 0.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_is_float32_whatever_the_inputs_are(kind: str, level: float, dtype: torch.dtype) -> None:
    sample, velocity = rows(0).to(dtype), rows(1).to(dtype)
    noise = None if kind == "ode" else rows(2)
    # A 0-dim float32 sigma times a bfloat16 tensor is bfloat16, so scalars are where this goes wrong.
    sigmas = {"sigma": torch.tensor(0.6), "sigma_next": torch.tensor(0.25), "sigma_1": torch.tensor(0.9)}
    narrow = move(kind, level, sample=sample, velocity=velocity, noise=noise, **sigmas)
    wide = move(kind, level, sample=sample.float(), velocity=velocity.float(), noise=noise, **sigmas)
    assert narrow.next_sample.dtype == narrow.mean.dtype == narrow.std.dtype == torch.float32
    assert torch.equal(narrow.next_sample, wide.next_sample)
    if noise is not None:
        assert narrow.log_prob.dtype == torch.float32 and torch.equal(narrow.log_prob, wide.log_prob)


@pytest.mark.parametrize("kind", ["sde", "dance", "cps", "ode"])
def test_noise_level_0_is_the_euler_step_and_has_no_log_prob(kind: str) -> None:
    assert is_deterministic(kind, 0.0)
    moved = move(kind, 0.0)
    euler = rows(0) + (SIGMAS_NEXT - SIGMAS).view(-1, 1, 1) * rows(1)
    assert torch.equal(moved.next_sample, euler) and torch.equal(moved.mean, euler)
    assert moved.log_prob is None and not moved.std.any()


@pytest.mark.parametrize(("kind", "level"), STOCHASTIC)
def test_a_falling_noise_level_comes_to_the_euler_step(kind: str, level: float) -> None:
    assert not is_deterministic(kind, level)
    euler = move("ode", 0.0).next_sample
    distances = [
        (move(kind, scale * level, noise=rows(2)).next_sample - euler).abs().max()
        for scale in (1, 1e-1, 1e-3)
    ]
    assert distances[0] > distances[1] > distances[2] and distances[2] < 1e-2


@pytest.mark.parametrize("level", [0.2, 0.7, 1.0])
def test_cps_keeps_the_coefficients_of_signal_and_noise(level: float) -> None:
    """With the true velocity n - c of x = (1 - s) c + s n, the next state is (1 - s') c + s' n' and n' has variance 1."""
    clean, noise = rows(3), rows(4)
    sigma = SIGMAS.view(-1, 1, 1)
    after = SIGMAS_NEXT.view(-1, 1, 1)
    moved = move(
        "cps",
        level,
        sample=(1 - sigma) * clean + sigma * noise,
        velocity=noise - clean,
        noise=rows(2),
    )
    kept = math.cos(level * math.pi / 2)
    expected = (1 - after) * clean + after * (kept * noise + math.sqrt(1 - kept**2) * rows(2))
    torch.testing.assert_close(moved.next_sample, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [1.0, 0.99999994])
def test_a_first_sigma_close_to_1_takes_the_second_in_its_place(first: float) -> None:
    moved = move("sde", 0.7, sigma=first, sigma_next=0.9, noise=rows(2))
    expected = 0.7 * math.sqrt(1 / (1 - SIGMA_1)) * math.sqrt(0.1)
    torch.testing.assert_close(moved.std, torch.full((5,), expected), rtol=1e-5, atol=0)


def test_gradients_reach_the_velocity_through_the_log_prob() -> None:
    velocity = rows(1).requires_grad_()
    stored = move("sde", 0.7, noise=rows(2)).next_sample
    move("sde", 0.7, velocity=velocity, next_sample=stored).log_prob.sum().backward()
    assert velocity.grad is not None and torch.isfinite(velocity.grad).all() and velocity.grad.abs().max() > 0


def test_inputs_are_left_as_they_were() -> None:
    sample, velocity, noise = rows(0), rows(1), rows(2)
    move("sde", 0.7, sample=sample, velocity=velocity, noise=noise)
    assert torch.equal(sample, rows(0)) and torch.equal(velocity, rows(1)) and torch.equal(noise, rows(2))


@pytest.mark.parametrize(
    ("kind", "level", "given", "message"),
    [
        ("sde", 0.7, {}, "a sde transition takes either noise .* or next_sample"),
        ("cps", 0.7, {"noise": rows(2), "next_sample": rows(3)}, "a cps transition takes either noise"),
        ("cps", 1.2, {"noise": rows(2)}, r"noise_level of cps must lie in \[0, 1\].*got 1.2"),
        ("cps", -0.2, {"noise": rows(2)}, r"noise_level of cps must lie in \[0, 1\].*got -0.2"),
        ("sde", -0.5, {"noise": rows(2)}, "noise_level must be at least 0, got -0.5"),
        ("dance", -0.5, {"noise": rows(2)}, "noise_level must be at least 0, got -0.5"),
        (
            "cps",
            0.7,
            {"noise": rows(2), "sigma": 0.1, "sigma_next": 0.0},
            "cps with noise_level 0.7 has std 0 between sigma 0.1, .* make this step ode",
        ),
    ],
)
def test_a_move_that_cannot_be_made_is_refused_with_its_reason(
    kind: str, level: float, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        move(kind, level, **given)
