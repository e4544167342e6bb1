"""``num_items`` wants a mean loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuron_accel.errors import UsageError
from neuron_accel.loop.step import check_is_mean

LABELS = torch.tensor([1, 2, 3, -100])


def logits():
    return torch.linspace(-1, 1, 20).view(4, 5).requires_grad_(True)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.cross_entropy(x, LABELS, reduction="sum"),
        lambda x: F.cross_entropy(x, LABELS, reduction="none").sum(),
        lambda x: F.cross_entropy(x.bfloat16(), LABELS, reduction="sum").float(),
        lambda x: F.mse_loss(x, torch.zeros(4, 5), reduction="none").sum(1).sum(),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros(4, 5), reduction="sum"),
    ],
)
def test_a_sum_is_refused(loss):
    with pytest.raises(UsageError, match="a sum over items"):
        check_is_mean(loss(logits()))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.cross_entropy(x, LABELS),
        lambda x: F.cross_entropy(x, LABELS, reduction="sum") / 3,
        lambda x: (F.cross_entropy(x, LABELS, reduction="none") / 3).sum(),
        lambda x: F.cross_entropy(x, LABELS, reduction="none").mean(),
        lambda x: x.square().sum(),  # a sum over features is the mean over one sample
        lambda x: torch.zeros(()),
    ],
)
def test_what_may_be_a_mean_is_not(loss):
    check_is_mean(loss(logits()))
