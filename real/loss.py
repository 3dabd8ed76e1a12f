"""The policy-gradient loss: pure functions of tensors.

Shapes: N rollouts, T output positions (right-padded); a mask is 1 where a token counts and 0 elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, groups: Tensor, epsilon: float = 1e-6) -> Tensor:
    """(reward - mean of its group) / (standard deviation of its group + epsilon); rewards and groups have shape [N].

    A group whose rewards are all equal, a group of one included, has advantage 0: it teaches nothing. The deviation
    is the population's. Source: GRPO, arXiv 2402.03300, section 4.1.2.
    """
    advantages = torch.zeros_like(rewards)
    for group in torch.unique(groups):
        members = groups == group
        own = rewards[members]
        advantages[members] = (own - own.mean()) / (own.std(correction=0) + epsilon)
    return advantages


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token; logits [N, T, V], tokens [N, T], result [N, T]."""
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens that count; 0 when none does."""
    return (values * mask).sum() / mask.sum().clamp(min=1.0)


class Loss(NamedTuple):
    """The loss (scalar, differentiable) and how often the clip decided it."""

    loss: Tensor
    clip_fraction: Tensor


def clipped_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Loss:
    """Token mean of -min(r * A, clip(r, 1 - low, 1 + high) * A) with r = exp(new - old).

    `new` and `old` are log-probabilities [N, T], `advantages` [N], `mask` [N, T]. Source: PPO, arXiv 1707.06347,
    equation 7.
    """
    ratio = torch.exp(new - old)
    weight = advantages.unsqueeze(-1)
    plain = ratio * weight
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * weight
    return Loss(
        -masked_mean(torch.minimum(plain, clipped), mask), masked_mean((clipped < plain).float(), mask).detach()
    )


def reference_penalty(new: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """Token mean of exp(d) - d - 1 with d = reference - new: an unbiased, non-negative estimate of the KL divergence
    from the reference (J. Schulman, "Approximating KL divergence", the k3 estimator)."""
    difference = reference - new
    return masked_mean(torch.exp(difference) - difference - 1.0, mask)
