"""The mathematics of examples/grpo: advantages, the clipped loss, the distance from a reference."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from examples.grpo.loss import advantages, clipped_loss, kl, shuffled


def test_advantages_compare_a_sample_with_its_own_group_alone() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0, 6.0], [101.0, 102.0, 103.0, 106.0]])
    found = advantages(rewards)
    torch.testing.assert_close(found.mean(dim=1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.std(dim=1, unbiased=False), torch.ones(2))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)
    assert found.argmax(dim=1).tolist() == [3, 3]


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    assert not advantages(torch.full((1, 5), 0.3)).any()


def test_shuffled_advantages_stay_in_their_group() -> None:
    values = torch.arange(12.0).reshape(2, 6)
    found = shuffled(values, torch.Generator().manual_seed(1))
    assert torch.equal(found.sort(dim=1).values, values) and not torch.equal(found, values)
    assert not torch.equal(found[0].argsort(), found[1].argsort())


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_on_policy_the_ratio_is_one_and_the_gradient_the_advantage(advantage: float) -> None:
    log_prob = torch.tensor(-0.9, requires_grad=True)
    loss, ratio = clipped_loss(log_prob, float(log_prob.detach()), advantage, 0.01)
    loss.backward()
    assert ratio == 1.0 and loss.item() == -advantage
    assert log_prob.grad is not None and log_prob.grad.item() == -advantage


@pytest.mark.parametrize(
    ("moved", "advantage", "has_gradient"),
    [(0.05, 1.0, False), (0.05, -1.0, True), (-0.05, -1.0, False), (-0.05, 1.0, True)],
)
def test_past_the_clip_range_only_the_way_back_has_a_gradient(
    moved: float, advantage: float, has_gradient: bool
) -> None:
    log_prob = torch.tensor(-0.9 + moved, requires_grad=True)
    loss, ratio = clipped_loss(log_prob, -0.9, advantage, 0.01)
    loss.backward()
    assert ratio == pytest.approx(math.exp(moved), rel=1e-5)
    assert log_prob.grad is not None and bool(log_prob.grad) is has_gradient


def test_the_distance_to_the_reference_is_that_of_gaussians_per_element() -> None:
    mean, reference = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(1))
    exact = kl_divergence(Normal(mean, 0.3), Normal(reference, 0.3)).mean()
    torch.testing.assert_close(kl(mean, reference, 0.3), exact)
    assert kl(mean, mean, 0.3) == 0
