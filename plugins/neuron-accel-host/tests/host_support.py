"""Groups of this backend beside gloo's default group, for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist
from neuron_accel_host import NAME, HostGroup, transport

needs_shared_memory = pytest.mark.skipif(transport.why_not_here() is not None, reason=str(transport.why_not_here()))


def new_group(ranks: Sequence[int] | None = None, seconds: float = 60) -> HostGroup:
    group = dist.new_group(ranks, timeout=timedelta(seconds=seconds), backend=NAME)
    assert isinstance(group, HostGroup)
    return group
