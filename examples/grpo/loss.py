"""The mathematics of GRPO that is not the sampler's: advantages in a group, and the clipped ratio of one log-prob.

Each modality has rewards, advantages, log-probs and ratios of its own. A log-prob is the mean over one modality's
elements, so ratios are near 1 and clip ranges small.
"""

import torch
from torch import Tensor


def advantages(rewards: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Each reward against its group's: (reward - mean) / standard deviation. [groups, samples], both ways.

    A group whose rewards are all the same teaches nothing: 0.
    """
    deviation = rewards - rewards.mean(dim=1, keepdim=True)
    return deviation / (rewards.std(dim=1, keepdim=True, unbiased=False) + epsilon)


def shuffled(values: Tensor, generator: torch.Generator) -> Tensor:
    """The same values in each group, handed to its samples at random."""
    order = torch.rand(values.shape, generator=generator).argsort(dim=1)
    return values.gather(1, order)


def clipped_loss(
    log_prob: Tensor, old_log_prob: float, advantage: float, clip_range: float
) -> tuple[Tensor, float]:
    """PPO's loss of one move, and the ratio of its probabilities under the new and the old policy.

    Past the clip range there is no gradient further away from the old policy, but always one back to it.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio * advantage, clipped * advantage), float(ratio.detach())


def kl(mean: Tensor, reference_mean: Tensor, std: float) -> Tensor:
    """Distance of a move from the reference policy's, per element: that of two Gaussians of one std, in closed form.

    Log-probs are means over elements, so no estimate from their difference is one of this.
    """
    return (mean - reference_mean).square().mean() / (2 * std**2)
