# SPDX-License-Identifier: Apache-2.0
"""The outer loop: the changes of the weights in some inner steps become one step of an outer optimizer.

The outer optimizer keeps an *anchor* for each parameter, in float32: the weights on which the islands agreed last. The
mean over islands of the differences between the anchor and their weights is its gradient. Ranks of an island that hold
the same parameter each keep one slice of its anchor, and of the outer optimizer's state, and send that slice only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from neuron_accel.contract import ShardedState, take_weights
from neuron_accel.contract.sharded import needs_closure, why_not_elementwise
from neuron_accel.errors import CheckpointError, ConfigurationError, UsageError
from neuron_accel_local_sgd.wire import Mean, known, start_mean

if TYPE_CHECKING:
    from neuron_accel.contract import Group, ParameterRecord, Run

AXIS = "island"
"""Axis of the mesh along which islands differ."""
WHERE = "plugin 'local_sgd'"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When islands synchronise, and which parameters.

    Args:
        inner_steps: number of inner steps between two outer steps of a fragment.
        fragments: number of fragments, which synchronise one after another.
        delay: number of inner steps between sending differences and using their mean.
        local_weight: fraction of an island's own weights in those with which it continues; the rest is the anchor's.
        warmup_steps: number of first steps after each of which weights are averaged.
        wire: dtype in which differences are sent.
    """

    inner_steps: int
    fragments: int
    delay: int
    local_weight: float
    warmup_steps: int
    wire: str

    def due(self, steps: int) -> list[int]:
        """Returns the fragments that are sent after inner step ``steps``, counted from 1."""
        since = steps - self.warmup_steps
        if since <= 0:
            return list(range(self.fragments))
        return [at for at in range(self.fragments) if (since - self.offset(at)) % self.inner_steps == 0]

    def offset(self, fragment: int) -> int:
        """Number of steps by which a fragment is behind the first."""
        return fragment * self.inner_steps // self.fragments


class Shard:
    """A parameter of this rank, and its slice in the outer optimizer.

    Args:
        model: position of its model in ``run.models``.
        record: the parameter.
        run: the run.
    """

    def __init__(self, model: int, record: ParameterRecord, run: Run) -> None:
        self.model, self.record, self._run = model, record, run
        self.group: Group = run.group(*record.reduction_axes(run.mesh))
        self.anchor = nn.Parameter(self.slice_of(self.weight).float().clone(), requires_grad=False)

    @property
    def name(self) -> str:
        """Unique name in a run."""
        return _name(self.model, self.record)

    @property
    def weight(self) -> nn.Parameter:
        assert self.record.current is not None  # the optimizer holds it
        return self.record.current

    @property
    def is_partial(self) -> bool:
        """Whether the anchor has only some elements of the parameter of the original model."""
        return self.group.size > 1 or bool(self.record.layout.cuts)

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's slice of a tensor in the shape of the weight: the tensor itself if no other rank of the
        island holds the weight, else ``[slice]``, the last one padded with zeros."""
        if self.group.size == 1:
            return tensor.detach()
        flat = tensor.detach().reshape(-1)
        return self._run.backend.chunk(F.pad(flat, (0, -flat.numel() % self.group.size)), self.group)

    def from_slices(self, rows: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`slice_of`: joins the slices of all ranks ``[ranks, slice]``."""
        return rows.reshape(-1)[: self.weight.numel()].view(self.weight.shape)

    def learned(self) -> torch.Tensor:
        """Returns the difference between the weights with which this island started and those that it has, ``[slice]``,
        float32. A model in half precision starts with the rounded anchor, so the difference has no error of it."""
        start = self.anchor.detach().to(self.weight.dtype).float()
        return (start - self.slice_of(self.weight).float()).reshape(-1)


@dataclass
class Exchange:
    """Differences under way.

    Args:
        shards: the parameters, in the order in which they are in the message.
        mean: the mean over islands.
        started, arrives: inner steps after which it started, and after which it is used.
    """

    shards: list[Shard]
    mean: Mean
    started: int
    arrives: int


class OuterLoop:
    """Synchronises the parameters of one inner optimizer.

    The anchors are the weights at the first inner step, so whatever was loaded into the model before counts.

    Args:
        optimizer: the inner optimizer, as hooks receive it.
        make_outer: creates the outer optimizer for a list of anchors.
        schedule: when to synchronise.
        run: the run.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        make_outer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
        schedule: Schedule,
        run: Run,
    ) -> None:
        self.optimizer, self._make_outer, self._schedule, self._run = optimizer, make_outer, schedule, run
        self._islands = run.group(AXIS)
        self.restart()

    def restart(self) -> None:
        """Resets the loop: the next inner step is the first, and the anchors are the weights before it."""
        self.steps = 0
        self._agreed_at = 0  # the number of steps after which all islands had equal weights
        self.shards: dict[str, Shard] = {}
        self._outer: torch.optim.Optimizer | None = None
        self._exchanges: list[Exchange] = []
        self._frozen: set[str] = set()

    # ---- a step ------------------------------------------------------------------------------------------------------
    def before_step(self) -> None:
        """Adds parameters that begin to train now, which are equal on every island.

        Raises:
            UsageError: if a parameter was frozen while islands have different values of it.
        """
        frozen = {name for name, shard in self.shards.items() if not _trains(shard.record)}
        if frozen - self._frozen and self._agreed_at != self.steps:
            raise UsageError(
                f"{self.shards[min(frozen - self._frozen)].record.fqn!r} was frozen between two synchronisations.",
                where=WHERE,
                why="islands have different values of it, and would keep them",
                fix="call `neuron_accel_local_sgd.synchronize(accelerator)` before it is frozen",
            )
        self._frozen = frozen
        self._add([entry for entry in self._held() if _trains(entry[1]) and _name(*entry) not in self.shards])

    def after_step(self) -> None:
        """Counts an inner step, and synchronises what is due after it. Collective."""
        self.steps += 1
        changed = self._receive(lambda exchange: exchange.arrives <= self.steps)
        schedule, is_warmup = self._schedule, self.steps <= self._schedule.warmup_steps
        due = set(schedule.due(self.steps))
        fragments = [shards for at, shards in enumerate(self._fragments()) if at in due and shards]
        if is_warmup:
            for shards in fragments:
                self._average(shards)
            changed = True
        else:
            for shards in fragments:
                self._exchanges.append(self._send(shards, schedule.delay))
            changed |= self._receive(lambda exchange: exchange.arrives <= self.steps)
        if is_warmup or (len(due) == schedule.fragments and not schedule.delay and not schedule.local_weight):
            self._agreed_at = self.steps
        for exchange in self._exchanges:
            if self.steps >= (exchange.started + exchange.arrives + 1) // 2:
                exchange.mean.advance()
        if changed:
            take_weights(self.optimizer, self._run)

    def synchronize(self) -> None:
        """Makes all islands equal: completes pending exchanges, and takes an outer step with the changes since the last
        one. Does nothing if islands are equal. Collective."""
        if self._agreed_at == self.steps:
            return
        equal = {shard.name for exchange in self._exchanges for shard in exchange.shards}
        self._receive(lambda exchange: True)
        if not self._schedule.delay:
            equal |= {shard.name for at in self._schedule.due(self.steps) for shard in self._fragments()[at]}
        if self._schedule.local_weight:
            equal = set()
        if behind := [s for s in self.shards.values() if s.name not in equal and _trains(s.record)]:
            self._apply(self._send(behind, 0), local_weight=0.0)
        self._agreed_at = self.steps
        take_weights(self.optimizer, self._run)

    def wait(self) -> None:
        """Waits for what is under way, without using it yet. Collective."""
        for exchange in self._exchanges:
            exchange.mean = known(exchange.mean.wait())

    # ---- outer steps -------------------------------------------------------------------------------------------------
    def _send(self, shards: list[Shard], delay: int) -> Exchange:
        learned = torch.cat([shard.learned() for shard in shards])
        mean = start_mean(learned, self._islands, self._run.backend, self._schedule.wire)
        return Exchange(shards, mean, self.steps, self.steps + delay)

    def _receive(self, ready: Callable[[Exchange], bool]) -> bool:
        """Takes the outer steps whose means are ready; returns whether there were any."""
        arrived = [exchange for exchange in self._exchanges if ready(exchange)]
        self._exchanges = [exchange for exchange in self._exchanges if not ready(exchange)]
        for exchange in arrived:
            self._apply(exchange, local_weight=self._schedule.local_weight)
        return bool(arrived)

    def _apply(self, exchange: Exchange, *, local_weight: float) -> None:
        """Takes an outer step with a mean, and changes the weights accordingly."""
        assert self._outer is not None
        shards = exchange.shards
        for shard, mean in zip(shards, _split(exchange.mean.wait(), shards), strict=True):
            shard.anchor.grad = mean if _trains(shard.record) else None
        self._outer.step()
        for shard in shards:
            shard.anchor.grad = None
        self._write([shard for shard in shards if _trains(shard.record)], local_weight)

    def _average(self, shards: list[Shard]) -> None:
        """Sets anchors and weights to the mean of the islands' weights."""
        mean = self._send(shards, 0).mean.wait()
        with torch.no_grad():
            for shard, learned in zip(shards, _split(mean, shards), strict=True):
                shard.anchor.sub_(learned)
        self._write(shards, 0.0)

    @torch.no_grad()
    def _write(self, shards: Iterable[Shard], local_weight: float) -> None:
        """Moves the weights to the anchors."""
        shards = list(shards)
        anchors = self._joined(shards, [shard.anchor.detach().to(shard.weight.dtype) for shard in shards])
        for shard, anchor in zip(shards, anchors, strict=True):
            shard.weight.copy_(torch.lerp(anchor, shard.weight, local_weight) if local_weight else anchor)

    def _joined(self, shards: Sequence[Shard], slices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns tensors in the shapes of the weights, of which each rank of an island has a slice, by one all-gather
        for each group and dtype."""
        result = list(slices)
        kinds: dict[tuple[tuple[int, ...], torch.dtype], list[int]] = {}
        for at, (shard, tensor) in enumerate(zip(shards, slices, strict=True)):
            if shard.group.size > 1:
                kinds.setdefault((shard.group.ranks, tensor.dtype), []).append(at)
        for positions in kinds.values():
            group = shards[positions[0]].group
            flat = torch.cat([slices[at] for at in positions])
            rows = self._run.backend.all_gather(flat.unsqueeze(0), group)
            columns = rows.split([slices[at].numel() for at in positions], dim=1)
            for at, column in zip(positions, columns, strict=True):
                result[at] = shards[at].from_slices(column)
        return result

    # ---- which parameters --------------------------------------------------------------------------------------------
    def _held(self) -> Iterator[tuple[int, ParameterRecord]]:
        """The parameters that the inner optimizer holds, with the position of their model."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                for at, model in enumerate(self._run.models):
                    record = model.parameters.find(parameter)
                    if record is not None and record.current is not None:
                        yield at, record
                        break
                else:
                    raise UsageError(
                        "The optimizer holds a parameter of no prepared model.",
                        where=WHERE,
                        why="islands could not synchronise it",
                        fix="pass its model to `prepare`",
                    )

    def _add(self, entries: list[tuple[int, ParameterRecord]]) -> None:
        """Creates the anchors of parameters, whose values are equal on every island."""
        if not entries:
            return
        added = [Shard(model, record, self._run) for model, record in entries]
        self.shards.update((shard.name, shard) for shard in added)
        anchors = [shard.anchor for shard in added]
        if self._outer is None:
            self._outer = self._make_outer(anchors)
        else:
            self._outer.param_groups[0]["params"].extend(anchors)
        if any(shard.is_partial for shard in added):
            _check_elementwise(self._outer)

    def _fragments(self) -> list[list[Shard]]:
        """The parameters that train, in order, in fragments of about the same number of elements."""
        shards = [shard for shard in self.shards.values() if _trains(shard.record)]
        total = sum(shard.weight.numel() for shard in shards)
        fragments: list[list[Shard]] = [[] for _ in range(self._schedule.fragments)]
        before = 0
        for shard in shards:
            middle = before + shard.weight.numel() / 2
            fragments[min(int(middle * len(fragments) / total), len(fragments) - 1)].append(shard)
            before += shard.weight.numel()
        return fragments

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """Returns the state: anchors and the tensors of the outer optimizer as :class:`ShardedState`, by model; other
        values by parameter. Collective."""
        shards, run = list(self.shards.values()), self._run
        tensors: dict[str, dict[Shard, torch.Tensor]] = {"anchor": {shard: shard.anchor.detach() for shard in shards}}
        values: dict[str, dict[str, Any]] = {shard.name: {} for shard in shards}
        for shard in shards:
            for key, value in (self._outer.state.get(shard.anchor, {}) if self._outer else {}).items():
                if isinstance(value, torch.Tensor) and value.shape == shard.anchor.shape and value.dim():
                    tensors.setdefault(f"outer.{key}", {})[shard] = value
                elif value is not None:
                    values[shard.name][key] = run.backend.to_host(value) if torch.is_tensor(value) else value
        arriving: dict[str, tuple[int, int]] = {}
        for exchange in self._exchanges:
            parts = _split(exchange.mean.wait(), exchange.shards)
            tensors.setdefault("arriving", {}).update(zip(exchange.shards, parts, strict=True))
            arriving.update({shard.name: (exchange.started, exchange.arrives) for shard in exchange.shards})
        facts = run.backend.all_gather_object((sorted(tensors), values, arriving), run.world)
        result: dict[str, Any] = {
            "steps": self.steps,
            "agreed_at": self._agreed_at,
            "optimizer": type(self._outer).__name__ if self._outer else None,
            "values": {name: mine for _, values, _ in facts for name, mine in values.items()},
            "arriving": {name: list(steps) for _, _, arriving in facts for name, steps in arriving.items()},
        }
        for key in sorted({key for keys, *_ in facts for key in keys}):
            of_key = tensors.get(key, {})
            full = dict(zip(of_key, self._joined(list(of_key), list(of_key.values())), strict=True))
            for model in range(len(run.models)):
                mine = {shard.record.fqn: tensor for shard, tensor in full.items() if shard.model == model}
                result[f"{key}.model{model}"] = ShardedState(mine, model)
        return result

    def load(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state` returned.

        Raises:
            CheckpointError: if the state is that of another outer optimizer.
        """
        self.restart()
        self.steps, self._agreed_at = state["steps"], state["agreed_at"]
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            if isinstance(value, ShardedState):
                mine = tensors.setdefault(key.rpartition(".model")[0], {})
                mine.update({f"{value.model}:{fqn}": tensor for fqn, tensor in value.tensors.items()})
        anchors = tensors.pop("anchor", {})
        self._add([entry for entry in self._held() if _name(*entry) in anchors])
        self._frozen = {name for name, shard in self.shards.items() if not _trains(shard.record)}
        if self._outer is None:
            return
        if type(self._outer).__name__ != state["optimizer"]:
            raise CheckpointError(
                f"The checkpoint has the state of {state['optimizer']}, the outer optimizer is "
                f"{type(self._outer).__name__}.",
                where=WHERE,
                fix=f"set outer_optimizer={state['optimizer']!r}",
            )
        arriving = tensors.pop("arriving", {})
        for name, shard in self.shards.items():
            entries = {key.removeprefix("outer."): of[name] for key, of in tensors.items() if name in of}
            entries = {key: shard.slice_of(tensor.to(self._run.device)).clone() for key, tensor in entries.items()}
            with torch.no_grad():
                shard.anchor.copy_(shard.slice_of(anchors[name].to(self._run.device)))
            if entries := entries | dict(state["values"].get(name, {})):
                self._outer.state[shard.anchor] = entries
        steps_of = {name: tuple(steps) for name, steps in state["arriving"].items()}
        for started, arrives in sorted(set(steps_of.values())):
            if shards := [s for name, s in self.shards.items() if steps_of.get(name) == (started, arrives)]:
                flat = [shard.slice_of(arriving[shard.name].to(self._run.device)).reshape(-1) for shard in shards]
                self._exchanges.append(Exchange(shards, known(torch.cat(flat)), started, arrives))

    def describe(self, model: int) -> str:
        """Returns a line about what this loop sends, once the anchors exist; else an empty text."""
        shards = [shard for shard in self.shards.values() if shard.model == model]
        if not shards:
            return ""
        elements = sum(math.prod(shard.record.layout.shape) for shard in shards)
        slices = sum(shard.anchor.numel() for shard in shards)
        return f"  {elements:,} parameters; this rank keeps and sends {slices:,} elements of them every round"


def _name(model: int, record: ParameterRecord) -> str:
    return f"{model}:{record.fqn}"


def _trains(record: ParameterRecord) -> bool:
    return record.current is not None and record.current.requires_grad


def _split(flat: torch.Tensor, shards: Sequence[Shard]) -> list[torch.Tensor]:
    """Splits a message into tensors of the shapes of the anchors."""
    parts = flat.split([shard.anchor.numel() for shard in shards])
    return [part.view(shard.anchor.shape) for part, shard in zip(parts, shards, strict=True)]


def _check_elementwise(outer: torch.optim.Optimizer) -> None:
    reason = why_not_elementwise(outer)
    if reason is not None:
        raise ConfigurationError(
            f"{type(outer).__name__} is not possible as outer optimizer here.",
            where=WHERE,
            why=f"anchors are sharded over the ranks of an island, and {reason}",
            fix="choose an element-wise optimizer (SGD, Adam, ...), or islands of one rank",
        )


def check_steps_alone(outer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer needs no closure.

    Raises:
        ConfigurationError: if it does.
    """
    if needs_closure(outer):
        raise ConfigurationError(
            f"{type(outer).__name__} is not possible as outer optimizer.",
            where=WHERE,
            why="it runs forward and backward passes in its step; an outer step has differences only",
            fix="choose an optimizer that steps without a closure",
        )
