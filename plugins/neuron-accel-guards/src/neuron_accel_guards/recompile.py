# SPDX-License-Identifier: Apache-2.0
"""Reports graphs that are compiled after the first steps, with the input that caused them."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

import neuron_accel
from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import ConfigurationError, RecompileError

if TYPE_CHECKING:
    from neuron_accel.contract import PreparedModel, Run


_WHY = "on Trainium every graph is compiled by itself, which takes minutes, and all ranks wait for it"
_FIX = (
    "give every batch the same shape (pad it, drop_last=True, or pad the last batch), and keep Python values that "
    "change out of the forward pass; tensors may change"
)


class RecompileWarning(UserWarning):
    """A graph that was not compiled before."""


@dataclass(frozen=True, kw_only=True)
class RecompileGuard(StrategyPlugin):
    """Counts graphs. For a new graph after the first steps it reports which input changed, from what to what, and where
    in the user's code.

    On a lazy device it counts compiled graphs. On other devices it counts the graphs that a lazy device would compile:
    calls of a prepared model with inputs of another shape, dtype or Python value than before, and steps with another
    number of micro-batches. It thus shows on a CPU what would be compiled on Trainium. The first graph of each use of a
    model (training, evaluating) is not reported.

    Args:
        action: "warn" (a :class:`RecompileWarning`) or "raise" (a
            :class:`~neuron_accel.errors.RecompileError`).
        warmup_steps: number of optimizer steps in which new graphs are not reported: the first creates the optimizer's
            state.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="recompile_guard",
        api_version=4,
        phase=Phase.OPTIMIZER,
        provides=frozenset({"looks-at-values", "weights-in-passes"}),
    )

    action: Literal["warn", "raise"] = "warn"
    warmup_steps: int = 2

    def __post_init__(self) -> None:
        if self.action not in ("warn", "raise"):
            raise ConfigurationError(f"action is {self.action!r}.", fix="give 'warn' or 'raise'")
        if self.warmup_steps < 1:
            raise ConfigurationError(f"warmup_steps is {self.warmup_steps}; the first step always makes graphs.")

    def graphs(self, run: Run) -> int:
        """Returns the number of graphs so far: compiled ones, or those that a lazy device would compile."""
        return self._watch(run).graphs

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Watches the inputs' shapes and types."""
        watch, index = self._watch(run), len(run.models)

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            use = f"model {index} {'training' if module.training else 'evaluating'}"
            use += "" if torch.is_grad_enabled() else " without gradients"
            self._report(watch.called(use, signature_of(module, args, kwargs), place_in_users_code()))

        run.undo(model.module.register_forward_pre_hook(look, with_kwargs=True).remove)

    def backward_pass(self, loss: torch.Tensor, run: Run) -> Iterator[None]:
        """Counts micro-batches."""
        yield
        self._watch(run).micro_batches += 1
        self._settle_later(run)

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Compares options and micro-batches with earlier steps."""
        yield
        options = {
            f"param_groups[{i}][{name!r}]": repr(value)
            for i, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if isinstance(value, (bool, int, float, str)) and name not in ("lr", "initial_lr")
        }
        self._report(self._watch(run).stepped(options, place_in_users_code()))
        self._settle_later(run)

    def _settle_later(self, run: Run) -> None:
        """Reports new graphs, at the end of a micro-batch or of a step."""

        def settle() -> None:
            state.pop("waits", None)
            self._report(self._watch(run).settled(run.backend.compilations))

        state = run.state(self)
        if run.backend.is_lazy and not state.get("waits"):
            state["waits"] = True
            run.backend.after_step(settle, reads_graph=True)

    def _watch(self, run: Run) -> GraphWatch:
        state = run.state(self)
        if "watch" not in state:
            state["watch"] = GraphWatch(self.warmup_steps, run.backend.compilations)
        return state["watch"]

    def _report(self, finding: Finding | None) -> None:
        if finding is None:
            return
        what, where = f"A new graph in step {finding.step}: {finding.what}.", finding.where
        if self.action == "raise":
            raise RecompileError(what, where=where, why=_WHY, fix=_FIX)
        warnings.warn(f"{what}\n  where: {where}\n  why: {_WHY}\n  fix: {_FIX}", RecompileWarning, stacklevel=2)


@dataclass(frozen=True)
class Finding:
    """A graph that should not have been compiled.

    Args:
        step: number of the optimizer step, from 1.
        what: what changed.
        where: in the user's code.
    """

    step: int
    what: str
    where: str


@dataclass
class GraphWatch:
    """The graphs so far.

    Args:
        warmup_steps: number of steps in which new graphs are not reported.
        compiled: number of graphs compiled so far; None on devices without a compiler.
    """

    warmup_steps: int
    compiled: int | None
    step: int = 1
    micro_batches: int = 0
    _seen: dict[str, list[Signature]] = field(default_factory=dict)
    _calls: Counter[str] = field(default_factory=Counter)
    _suspects: list[tuple[str, str]] = field(default_factory=list)  # what is new since the last boundary, and where
    _excused: bool = False
    _options: Signature = field(default_factory=dict)
    _place: str = "the first step"
    _first: int = 0

    def __post_init__(self) -> None:
        self._first = self.compiled or 0

    @property
    def graphs(self) -> int:
        return sum(map(len, self._seen.values())) if self.compiled is None else self.compiled - self._first

    @property
    def warming_up(self) -> bool:
        return self.step <= self.warmup_steps

    def called(self, use: str, signature: Signature, place: str) -> Finding | None:
        """Must be called when a model is called. Returns a finding on devices without a compiler."""
        self._place = place
        self._calls[use] += 1
        known = self._seen.setdefault(use, [])
        if self._calls[use] <= self.warmup_steps:
            self._excused = True  # graphs of a new use of a model, and of its results
        if signature in known:
            return None
        changes = differences(nearest(signature, known), signature) if known else []
        known.append(signature)
        if not changes:
            return None
        return self._suspect(f"{use}: {'; '.join(changes)}", place)

    def stepped(self, options: Signature, place: str) -> Finding | None:
        """Must be called after an optimizer step."""
        count, self.micro_batches = str(self.micro_batches), 0
        known = self._seen.setdefault("step", [])
        finding = None
        signature = {"micro-batches in a step": count}
        if signature not in known:
            changes = differences(known[-1], signature) if known else []
            known.append(signature)
            if changes:
                finding = self._suspect("; ".join(changes), place)
        changed = differences(self._options, options) if self._options else []
        if changed:
            self._suspects.append((f"optimizer: {'; '.join(changed)}", place))
        self._options, self._place = options, place
        if self.compiled is None:
            self._next_step()
        return finding

    def settled(self, compiled: int | None) -> Finding | None:
        """Must be called when the pending operations were submitted to the device, which has compiled ``compiled``
        graphs so far."""
        if compiled is None or self.compiled is None:
            return None
        finding = None
        if compiled > self.compiled and not self.warming_up and not (self._excused and not self._suspects):
            what = "; ".join(text for text, _ in self._suspects) or (
                "no input of a prepared model changed; a value was read inside the step (item(), print, float()), or a "
                "Python number in the loop changed"
            )
            finding = Finding(self.step, what, self._suspects[0][1] if self._suspects else self._place)
        self.compiled = compiled
        if self.micro_batches == 0:
            self._next_step()
        else:
            self._suspects, self._excused = [], False
        return finding

    def _suspect(self, what: str, place: str) -> Finding | None:
        self._suspects.append((what, place))
        return Finding(self.step, what, place) if self.compiled is None and not self.warming_up else None

    def _next_step(self) -> None:
        self.step += 1
        self._suspects, self._excused = [], False


# ---- Signatures: shapes, dtypes and Python values of inputs, on which the graph of a forward pass depends ------------
Signature = dict[str, str]
"""Dtype and shape of a tensor, or the value of another input, by the name of the input."""

_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (neuron_accel, torch) if module.__file__)
_OURS = (str(Path(__file__).parent), *_LIBRARIES)


def signature_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """Returns the signature of a call of ``module``, by the argument names of its ``forward``."""
    found: Signature = {}
    for name, value in _named(module, args, kwargs):
        _describe(name, value, found)
    return found


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    try:
        names = [
            name
            for name, parameter in inspect.signature(module.forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    positional = [(names[i] if i < len(names) else f"argument {i}", value) for i, value in enumerate(args)]
    return [*positional, *kwargs.items()]


def _describe(name: str, value: Any, found: Signature) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        found[name] = repr(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _describe(f"{name}[{key!r}]", item, found)
    elif isinstance(value, (list, tuple)):
        found[f"len({name})"] = str(len(value))
        for index, item in enumerate(value):
            _describe(f"{name}[{index}]", item, found)
    else:
        found[name] = f"a {type(value).__name__}"


def differences(old: Signature, new: Signature) -> list[str]:
    """Returns a text like ``"input_ids: int64[2, 12] -> int64[2, 7]"`` for each input that changed."""
    return [
        f"{name}: {old.get(name, '(not given)')} -> {new.get(name, '(not given)')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def nearest(signature: Signature, known: list[Signature]) -> Signature:
    """Returns the known signature with the fewest differences from ``signature``, the latest of several."""
    return min(reversed(known), key=lambda other: len(differences(other, signature)))


def place_in_users_code() -> str:
    """Returns the innermost frame outside of this package, neuron_accel and torch, as ``"train.py:31"``."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(("<", *_OURS)):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown place"
