"""The random numbers that decide the order of an epoch, so that a later run on another mesh can draw it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler

Order = dict[str, Any]
"""``default``: state of the default generator when the epoch began; ``own``: of the sampler's, or ``drawn``: of the one
that it made itself from the default one; ``seed``: of a sampler that makes its generator from a seed and the epoch."""


def sampler_of(loader: Any) -> Any:
    """What draws single samples, below all batching; None if there is no such thing."""
    sampler = loader.batch_sampler
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", None)


def order_of(loader: Any) -> Order:
    """What the epoch that begins now is drawn from. Draws nothing itself."""
    order: Order = {"default": torch.get_rng_state()}
    sampler = sampler_of(loader)
    if isinstance(sampler, SeedableRandomSampler):
        order["seed"] = sampler.initial_seed
    elif isinstance(sampler, RandomSampler):
        if sampler.generator is None:
            order["drawn"] = _peek(loader)
        else:
            order["own"] = sampler.generator.get_state()
    return order


def _peek(loader: Any) -> torch.Tensor:
    """The state of the generator that a random sampler without one will make: from the default one, after the loader
    has drawn the seed of its workers."""
    now = torch.get_rng_state()
    try:
        if loader.base_dataloader.generator is None:
            torch.empty((), dtype=torch.int64).random_()
        seed = int(torch.empty((), dtype=torch.int64).random_())
    finally:
        torch.set_rng_state(now)
    return torch.Generator().manual_seed(seed).get_state()


def set_order(loader: Any, order: Order) -> None:
    """The next epochs are drawn as those after ``order`` were: from the sampler's own generator, where it had one."""
    sampler = sampler_of(loader)
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = order.get("seed", sampler.initial_seed)
    elif isinstance(sampler, RandomSampler) and "own" in order:
        sampler.generator = sampler.generator or torch.Generator()
        sampler.generator.set_state(order["own"])


@contextmanager
def drawing(loader: Any, order: Order) -> Iterator[None]:
    """Inside, the order of an epoch is drawn from ``order``; the default generator is then as it was before."""
    now, sampler = torch.get_rng_state(), sampler_of(loader)
    set_order(loader, order)
    torch.set_rng_state(order["default"])
    if isinstance(sampler, RandomSampler) and "drawn" in order and sampler.generator is not None:
        sampler.generator.set_state(order["drawn"])
    try:
        yield
    finally:
        torch.set_rng_state(now)
