# SPDX-License-Identifier: Apache-2.0
"""The plugin of activation checkpointing."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin, wrap_forward
from neuron_accel.contract.families import Architecture, BlockwiseAttention, matches_fqn
from neuron_accel.errors import ConfigurationError, UnsupportedModelError, UsageError, did_you_mean

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, PreparedModel, Run

BLOCKS, ATTENTION, CORE_ATTENTION = "blocks", "attention", "core_attention"
_WHERE = "plugin 'activation_checkpointing'"


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingPlugin(StrategyPlugin):
    """Recomputes the activations of some modules in the backward pass instead of keeping them, which saves memory and
    costs compute. Losses and gradients are the same, also with dropout.

    Only the inputs of a recomputed module are kept. If every block is recomputed, a step computes the forward pass
    twice and takes about a third longer. Recomputing attention alone is cheaper and drops the scores, whose size is
    quadratic in the length of the sequence.

    It is non-re-entrant on every backend: gradients of parameters are accumulated once, and reduced while the backward
    pass runs. On XLA optimization barriers prevent the compiler from merging both computations, see
    :meth:`Backend.recompute <neuron_accel.contract.Backend.recompute>`. A key/value cache that a model passes to a
    recomputed module in training is left out, as transformers does.

    Args:
        modules: what is recomputed: ``"blocks"``, the repeated blocks of the model; ``"attention"``, the attention
            modules in them, with their projections; ``"core_attention"``, scores, softmax and weighted values of every
            attention layer of a transformers model, without its projections; or FQN patterns, one or several, in which
            ``*`` stands for one segment or a part of it (``"model.layers.*.mlp"``). A module inside another one that is
            recomputed belongs to it.
        every: of the modules found, in the model's order, only every n-th is recomputed, beginning with the first. In
            a pipeline, those of all stages are counted. With ``"core_attention"`` it is 1.
    """

    modules: str | tuple[str, ...] = BLOCKS
    every: int = 1

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="activation_checkpointing", api_version=4, phase=Phase.MEMORY, provides=frozenset({"weights-in-passes"})
    )

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigurationError(
                f"every is {self.every}; it must be at least 1.", where=_WHERE, fix="give 1 for all"
            )
        if not self.modules or not all(_patterns(self.modules)):
            raise ConfigurationError(
                f"modules is {self.modules!r}, which matches nothing.",
                where=_WHERE,
                fix=f"give {BLOCKS!r}, {ATTENTION!r}, {CORE_ATTENTION!r} or FQN patterns, or leave the plugin out",
            )
        if self.modules == CORE_ATTENTION and self.every != 1:
            raise ConfigurationError(
                f"every is {self.every} with modules={CORE_ATTENTION!r}.",
                where=_WHERE,
                why="one attention function serves all layers of a model",
                fix=f"leave every out, or choose modules={ATTENTION!r}",
            )

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Makes the chosen modules recompute their activations.

        Raises:
            ConfigurationError: if a pattern matches no module.
            UnsupportedModelError: if the model's blocks, or the attention modules in them, cannot be found.
            UsageError: if the model recomputes its layers by itself.
        """
        if not model.optimizable:
            return
        itself = [name for name, m in model.module.named_modules() if getattr(m, "gradient_checkpointing", False)]
        if itself:
            raise UsageError(
                f"{type(model.module).__name__} already checkpoints its activations (in {itself[-1]!r}).",
                where=_WHERE,
                why="they would be computed three times",
                fix="leave out gradient_checkpointing_enable() (in a Trainer: its flag), or the plugin",
            )
        if self.modules == CORE_ATTENTION:
            run.undo(BlockwiseAttention(run.backend).install(model.module, _WHERE))
            return
        names = [record.fqn for record in model.parameters]
        for _, module in _outermost(find_modules(model.module, self.modules, names)[:: self.every]):
            if not _is_elsewhere(module):
                run.undo(wrap_forward(module, functools.partial(_recompute, run.backend)))
                run.state(self).setdefault("modules", []).append(module)

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        """Lists the modules on this rank that are recomputed."""
        if self.modules == CORE_ATTENTION:
            return "scores and softmax of every attention layer are computed again in the backward pass"
        recomputed = {id(module) for module in run.state(self).get("modules", ())}
        names = [name for name, module in model.inner.named_modules() if id(module) in recomputed]
        if not names:
            return ""
        lines = [f"computed again in the backward pass ({len(names)} modules on this rank):"]
        return "\n".join([*lines, *(f"  {line}" for line in _summarise(names))])


# ---- which modules ---------------------------------------------------------------------------------------------------
def find_modules(
    model: nn.Module, wanted: str | tuple[str, ...], parameters: Iterable[str] = ()
) -> list[tuple[str, nn.Module]]:
    """Returns FQN and module of the selected modules, in the order of the model; in a pipeline, also the stubs of
    blocks of other stages.

    Args:
        wanted: see :class:`ActivationCheckpointingPlugin`.
        parameters: FQNs of all parameters of the model, those on other stages included.
    """
    if wanted == BLOCKS:
        return _blocks(model)
    if wanted == ATTENTION:
        return _attention(model)
    known = dict(model.named_modules())
    everywhere = {name.rpartition(".")[0] for name in parameters}
    everywhere |= {name[: dot.start()] for name in set(everywhere) for dot in re.finditer(r"\.", name)} | set(known)
    everywhere.discard("")
    for pattern in _patterns(wanted):
        if not any(matches_fqn(pattern, name) for name in everywhere):
            kinds = {re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name) for name in everywhere}
            raise ConfigurationError(
                f"{type(model).__name__} has no module {pattern!r}.",
                where=f"{_WHERE}, modules",
                fix=did_you_mean(pattern, {*kinds, BLOCKS, ATTENTION, CORE_ATTENTION}),
            )
    return [(n, m) for n, m in known.items() if any(matches_fqn(pattern, n) for pattern in _patterns(wanted))]


def _patterns(wanted: str | tuple[str, ...]) -> tuple[str, ...]:
    return (wanted,) if isinstance(wanted, str) else tuple(wanted)


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the layers that transformers can checkpoint, or else the blocks of the family's plan."""
    layers = sys.modules.get("transformers.modeling_layers")
    kind = getattr(layers, "GradientCheckpointingLayer", ())
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, kind) or _is_elsewhere(m)]
    if any(not _is_elsewhere(module) for _, module in found):
        return _outermost(found)
    try:
        return Architecture.of(model).blocks
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"The repeated blocks of {type(model).__name__} are not known.",
            where=_WHERE,
            why="it has no GradientCheckpointingLayer of transformers, and its family has no plan",
            fix="name them by a pattern: ActivationCheckpointingPlugin(modules='layers.*')",
        ) from error


def _attention(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the outermost modules in each block whose class has "Attention" in its name; for blocks of other stages,
    their stubs."""
    found = []
    for block_name, block in _blocks(model):
        inside = [
            (f"{block_name}.{name}", module)
            for name, module in block.named_modules()
            if name and "attention" in type(module).__name__.lower()
        ]
        found += [(block_name, block)] if _is_elsewhere(block) else _outermost(inside)
    if all(_is_elsewhere(module) for _, module in found):
        raise UnsupportedModelError(
            f"The blocks of {type(model).__name__} contain no attention module.",
            where=f"{_WHERE}, modules={ATTENTION!r}",
            why="no class in them has 'Attention' in its name",
            fix="name them by a pattern: ActivationCheckpointingPlugin(modules='layers.*.mixer')",
        )
    return found


def _is_elsewhere(module: nn.Module) -> bool:
    """Returns whether a module is the stub of a block on another pipeline stage."""
    return bool(getattr(module, "stands_for_another_stage", False))


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Removes modules that are inside another one of the list."""
    names = {name for name, _ in found}
    return [(name, module) for name, module in found if not any(above in names for above in _above(name))]


def _above(name: str) -> list[str]:
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def _summarise(names: list[str]) -> list[str]:
    """Returns lines of FQNs, in which those that differ only in numbers share a line."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        numbers = re.findall(r"(?:^|(?<=\.))\d+(?=\.|$)", name)
        kinds.setdefault(re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name), []).append(".".join(numbers))
    return [kind if "*" not in kind else f"{kind}: {', '.join(numbers)}" for kind, numbers in kinds.items()]


# ---- how they are recomputed -----------------------------------------------------------------------------------------
def _recompute(backend: Backend, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Is the forward of a recomputed module."""
    if not module.training:
        return forward(*args, **kwargs)
    # A cache would be updated twice.
    args = tuple(None if _is_cache(value) else value for value in args)
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    return backend.recompute(forward, *args, **kwargs)


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")
