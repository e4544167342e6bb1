"""Trainings in which one bit of one rank changes at a given step; run inside ranks of either backend."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from guards_support import Bigrams, token_batches

from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.contract.events import Collective, Observer
from neuron_accel.contract.sharded import ShardedOptimizer


def updated_state(optimizer):
    return optimizer.shard_state if isinstance(optimizer, ShardedOptimizer) else optimizer.state


def flip(tensor: torch.Tensor, bit: int = 22, index: int = 3) -> None:
    """Changes a bit of an element behind PyTorch's back, as a fault of the memory does."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.detach().view(kind).numpy().reshape(-1)[index] ^= 1 << bit


@dataclass(frozen=True, kw_only=True)
class Corrupts(StrategyPlugin):
    """Corrupts what ``what`` names on one rank in a step, counted from 1."""

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="corrupts", api_version=4, phase=Phase.ADAPTATION, provides=frozenset({"gathered-weights"})
    )

    what: str
    rank: int = 1
    at_step: int = 3
    bit: int = 29

    def setup(self, run):
        run.state(self).update(steps=0, watcher=Results(self, run))
        run.events.observe(run.state(self)["watcher"])

    def now(self, run, what):
        return self.what == what and run.backend.rank == self.rank and run.state(self)["steps"] + 1 == self.at_step

    def step(self, optimizer, run):
        if run.backend.is_lazy:
            self.change_in_graph(optimizer, run)
        elif self.now(run, "gradient"):
            flip(run.state(self)["watcher"].last, self.bit)
        elif self.now(run, "weight"):
            record = next(r for m in run.models for r in m.parameters if r.current is not None)
            flip(record.current if record.weights is None else record.weights.tensor, self.bit)
        elif self.now(run, "state"):
            flip(next(iter(updated_state(optimizer).values()))["exp_avg"], self.bit)
        yield
        if self.now(run, "update"):
            with torch.no_grad():
                next(iter(run.models[0].module.parameters()))[0, 0] += 1e-3
        run.state(self)["steps"] += 1

    def change_in_graph(self, optimizer, run):
        """All ranks trace the same graph, in which one of them multiplies by another number."""
        with torch.no_grad():
            if self.what == "weight":
                run.models[0].module.head.weight.data.mul_(self.factor(run))
            if self.what == "state":
                for entries in updated_state(optimizer).values():
                    entries["exp_avg"].data.mul_(self.factor(run))

    def factor(self, run):
        return run.backend.number(1.5 if self.now(run, self.what) else 1.0)


class Results(Observer):
    """Keeps the result of the last large sum, and corrupts it when its plugin says so."""

    def __init__(self, plugin, run):
        self._plugin, self._run, self.last, self._done = plugin, run, None, False

    def begin(self, event):
        if not isinstance(event, Collective) or sum(t.numel() for t in event.summed) < 100:
            return

        def finish(received, scale):
            self.last = received[0].reshape(-1)
            if self._run.backend.is_lazy:
                if self._plugin.what == "sum":
                    received[0].mul_(self._plugin.factor(self._run))
            elif self._plugin.now(self._run, "sum") and not self._done:
                self._done = True
                flip(self.last, self._plugin.bit)

        event.when_received(finish)


def train(
    plugins, what="", *, rank=1, step=3, bit=29, steps=6, every=None, backend=None, clip=False, dtype=None, lr=1e-2
):
    """Returns the number of collectives and of bytes of the last step, and the graphs compiled."""
    from neuron_accel_guards import SumCheck

    from neuron_accel import NeuronAccelerator
    from neuron_accel.testing import one_at_a_time

    guards: list[Any] = [SumCheck(every=every)] if every != 0 else []
    planted = [Corrupts(what=what, rank=rank, at_step=step, bit=bit)] if what else []
    accelerator = NeuronAccelerator(
        plugins=[*planted, *guards], config={"plugins": plugins, **({"backend": backend} if backend else {})}
    )
    with one_at_a_time() if backend == "xla" else contextlib.nullcontext():
        torch.manual_seed(0)
        model = Bigrams().to(dtype or torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = token_batches(min(steps, 8))
    offset = 1 + accelerator.run.data_parallel_rank  # other samples on each rank
    for number in range(steps):
        batch = {name: (value + offset) % 30 for name, value in batches[number % len(batches)].items()}
        batch = {name: value.to(accelerator.device) for name, value in batch.items()}
        with accelerator.run.backend.record() as traffic:
            accelerator.backward(model(**batch).loss)
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    graphs = accelerator.run.backend.compilations
    accelerator.end_training()
    found = [(t.op, t.sent) for t in traffic.transfers]
    return found, graphs


def train_with_uneven_inputs(plugins):
    """Rank 1 has fewer batches than rank 0, and takes part in its sums with zeros."""
    from neuron_accel_guards import SumCheck

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[SumCheck()], config={"plugins": plugins})
    torch.manual_seed(0)
    model = Bigrams()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in token_batches(2 if accelerator.run.backend.rank else 4):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
