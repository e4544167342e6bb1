# SPDX-License-Identifier: Apache-2.0
"""The script that each rank of ``neuron-accel test`` runs: ``python -m neuron_accel.cli.smoke RESULT_FILE SECONDS``.

It compares every collective with its definition, then trains tiny models for three steps through ``NeuronAccelerator``
and compares them with a plain loop in one process. Rank 0 prints a line for each check and writes the names of failed
checks to the file.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuron_accel import NeuronAccelerator
from neuron_accel.backends.base import Backend
from neuron_accel.backends.group import Group
from neuron_accel.parity import Training, compare, train_alone, train_on_rank
from neuron_accel.terminal import show

STEPS = 3
LENGTH, VOCABULARY = 8, 32

Comparison = Callable[[Backend, Group], tuple[Any, Any]]


def sent(rank: int, group: Group, device: torch.device) -> torch.Tensor:
    """The tensor that a rank contributes to a collective, of shape ``[4 * group.size]``. Small integers, whose sums are
    exact."""
    return (torch.arange(4.0 * group.size) + 100 * rank).to(device)


def all_sent(backend: Backend, group: Group) -> list[torch.Tensor]:
    return [sent(rank, group, backend.device) for rank in range(group.size)]


def check_all_reduce(backend: Backend, group: Group) -> tuple[Any, Any]:
    parts = torch.stack(all_sent(backend, group))
    found = [backend.all_reduce(parts[group.index].clone(), group, op) for op in ("sum", "max", "min")]
    return found, [parts.sum(0), parts.amax(0), parts.amin(0)]


def check_all_gather(backend: Backend, group: Group) -> tuple[Any, Any]:
    parts = all_sent(backend, group)
    return backend.all_gather(parts[group.index], group), torch.cat(parts)


def check_reduce_scatter(backend: Backend, group: Group) -> tuple[Any, Any]:
    parts = all_sent(backend, group)
    total = torch.stack(parts).sum(0)
    return backend.reduce_scatter(parts[group.index], group), total.chunk(group.size)[group.index]


def check_all_to_all(backend: Backend, group: Group) -> tuple[Any, Any]:
    parts = all_sent(backend, group)
    mine = [part.chunk(group.size)[group.index] for part in parts]
    return backend.all_to_all(parts[group.index], group), torch.cat(mine)


def check_permute(backend: Backend, group: Group) -> tuple[Any, Any]:
    parts = all_sent(backend, group)
    return backend.permute(parts[group.index], group), parts[group.index - 1]


def check_broadcast(backend: Backend, group: Group) -> tuple[Any, Any]:
    parts = all_sent(backend, group)
    return backend.broadcast(parts[group.index], group, group.size - 1), parts[-1]


def check_objects(backend: Backend, group: Group) -> tuple[Any, Any]:
    names = [f"rank {rank}" for rank in group.ranks]
    mine = names[group.index]
    found = [backend.all_gather_object(mine, group), backend.broadcast_object(mine, group, group.size - 1)]
    return found, [names, names[-1]]


COLLECTIVES: dict[str, Comparison] = {
    "all-reduce": check_all_reduce,
    "all-gather": check_all_gather,
    "reduce-scatter": check_reduce_scatter,
    "all-to-all": check_all_to_all,
    "permute": check_permute,
    "broadcast": check_broadcast,
    "objects": check_objects,
}


def same(found: Any, expected: Any) -> bool:
    """Whether nested lists of tensors and values are exactly equal."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


class Perceptron(nn.Module):
    """A model whose ``forward`` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(LENGTH, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(inputs), targets)


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def numbers(size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "inputs": torch.randn(size, LENGTH, generator=generator),
            "targets": torch.randn(size, 1, generator=generator),
        }
        for _ in range(STEPS)
    ]


def tokens(size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(VOCABULARY, (size, LENGTH), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": batch, "labels": batch.clone()} for batch in ids]


def trainings(ranks: int) -> dict[str, Callable[[], None]]:
    """The trainings to run, by name; that of a Llama needs transformers and an even number of ranks."""
    found: dict[str, Callable[[], None]] = {
        "training, data parallel": functools.partial(train, Perceptron, numbers(2 * ranks), []),
        "training, ZeRO-1": functools.partial(train, Perceptron, numbers(2 * ranks), ["zero1"]),
    }
    if ranks % 2 == 0 and importlib.util.find_spec("transformers"):
        plugins = [{"model_parallelism": {"tensor_parallel_size": 2}}, "sequence_parallel", "zero1"]
        found["training a Llama, tensor and sequence parallel, ZeRO-1"] = functools.partial(
            train, tiny_llama, tokens(ranks), plugins
        )
    return found


def train(model_fn: Callable[[], nn.Module], batches: list[dict[str, torch.Tensor]], plugins: list[Any]) -> None:
    """Trains on all ranks; raises AssertionError, on rank 0, if the result differs from training in one process."""
    training = Training(max_norm=1.0)
    trace = train_on_rank(model_fn, batches, {"plugins": plugins}, training)
    if trace is not None:
        compare(train_alone(model_fn, batches, training), trace)


class Checks:
    """Runs checks on all ranks, prints a line for each on rank 0, and records failures."""

    def __init__(self, backend: Backend, group: Group) -> None:
        self.backend, self.group = backend, group
        self.passed = 0
        self.failures: list[str] = []

    def check(self, name: str, verdict: Callable[[], str | None]) -> None:
        """Runs a check on all ranks. Collective.

        Args:
            name: what is checked.
            verdict: runs the check on this rank; returns None, or a description of the error.
        """
        start = time.monotonic()
        problems = self.backend.all_gather_object(verdict(), self.group)
        wrong = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
        if self.group.index == 0:
            show(f"{'FAILED' if wrong else 'ok':<8}{time.monotonic() - start:6.2f} s  {name}")
            for line in wrong:
                show(f"        {line}")
        self.passed += not wrong
        self.failures += [name] if wrong else []


def main(result_file: str, seconds: str) -> None:
    faulthandler.dump_traceback_later(float(seconds), exit=True)  # prints the stack of a hang
    run = NeuronAccelerator().run
    checks = Checks(run.backend, run.world)
    for name, comparison in COLLECTIVES.items():
        checks.check(name, functools.partial(_verdict_of_collective, comparison, run.backend, run.world))
    for name, training in trainings(run.backend.world_size).items():
        checks.check(name, functools.partial(_verdict_of_training, training))
    if run.backend.rank == 0:
        Path(result_file).write_text(json.dumps({"passed": checks.passed, "failed": checks.failures}))
    faulthandler.cancel_dump_traceback_later()


def _verdict_of_collective(comparison: Comparison, backend: Backend, group: Group) -> str | None:
    found, expected = comparison(backend, group)
    return None if same(found, expected) else f"got {found} instead of {expected}"


def _verdict_of_training(training: Callable[[], None]) -> str | None:
    try:
        training()
    except AssertionError as difference:
        return str(difference)
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
