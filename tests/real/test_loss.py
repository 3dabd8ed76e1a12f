"""The loss, against arithmetic done by hand and against autograd."""

from __future__ import annotations

import math

import pytest
import torch

from rlsched.real.loss import clipped_loss, group_advantages, masked_mean, reference_penalty, token_logprobs

pytestmark = pytest.mark.real


def test_advantages_are_relative_to_the_group():
    rewards = torch.tensor([1.0, 0.0, 5.0, 3.0, 3.0])
    got = group_advantages(rewards, torch.tensor([7, 7, 2, 2, 2]))
    third = math.sqrt(((5 - 11 / 3) ** 2 + 2 * (3 - 11 / 3) ** 2) / 3)
    assert got.tolist() == pytest.approx([1, -1, (4 / 3) / third, (-2 / 3) / third, (-2 / 3) / third], rel=1e-5)


def test_equal_rewards_and_lone_samples_teach_nothing():
    assert group_advantages(torch.tensor([0.3, 0.3, 0.9]), torch.tensor([0, 0, 1])).tolist() == [0, 0, 0]


def test_token_logprobs_are_those_of_the_softmax():
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0]]])
    got = token_logprobs(logits, torch.tensor([[1, 0]]))
    assert got.tolist()[0] == pytest.approx([math.log(0.75), math.log(0.5)])


def test_masked_mean_ignores_the_masked_and_survives_none():
    values = torch.tensor([[1.0, 100.0, 3.0]])
    assert float(masked_mean(values, torch.tensor([[1.0, 0.0, 1.0]]))) == 2.0
    assert float(masked_mean(values, torch.zeros(1, 3))) == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.1, 2.0, -2.2, 0.0),
        (1.5, 2.0, -2.4, 1.0),  # no reward for going further than 1.2
        (0.5, 2.0, -1.0, 0.0),
        (0.5, -2.0, 1.6, 1.0),
        (1.5, -2.0, 3.0, 0.0),  # but full blame
    ],
)
def test_clip(ratio, advantage, loss, clipped):
    old = torch.tensor([[-1.0]])
    new = old + math.log(ratio)
    got = clipped_loss(new, old, torch.tensor([advantage]), torch.ones(1, 1), 0.2, 0.2)
    assert float(got.loss) == pytest.approx(loss, rel=1e-5)
    assert float(got.clip_fraction) == clipped


def test_on_policy_gradient_is_the_plain_policy_gradient():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0]])
    advantages = torch.tensor([1.0, -0.5])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    logprobs = token_logprobs(logits, tokens)
    (ratio_gradient,) = torch.autograd.grad(
        clipped_loss(logprobs, logprobs.detach(), advantages, mask, 0.2, 0.2).loss, logits, retain_graph=True
    )
    (plain_gradient,) = torch.autograd.grad(-masked_mean(logprobs * advantages[:, None], mask), logits)
    assert torch.allclose(ratio_gradient, plain_gradient, atol=1e-6)
    assert ratio_gradient[1, 2].abs().max() == 0  # masked out


def test_reference_penalty_is_zero_at_the_reference_and_positive_elsewhere():
    new = torch.tensor([[-1.0, -2.0]])
    mask = torch.ones(1, 2)
    assert float(reference_penalty(new, new, mask)) == 0.0
    assert float(reference_penalty(new, new + 0.5, mask)) == pytest.approx(math.exp(0.5) - 1.5)
    assert float(reference_penalty(new, new - 0.5, mask)) == pytest.approx(math.exp(-0.5) - 0.5)
