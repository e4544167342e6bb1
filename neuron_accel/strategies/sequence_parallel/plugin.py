# SPDX-License-Identifier: Apache-2.0
"""Activations between tensor-parallel regions, sharded along the sequence."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from neuron_accel.contract import ParameterMap, Phase, PluginSpec, StrategyPlugin, wrap_forward
from neuron_accel.contract.families import Architecture, join_fqn
from neuron_accel.errors import PlanError, UnsupportedModelError, UsageError
from neuron_accel.strategies.tensor_parallel.cuts import AXIS
from neuron_accel.strategies.tensor_parallel.linear import is_row_parallel
from neuron_accel.strategies.tensor_parallel.overlap import GatherLate, replace_hidden
from neuron_accel.strategies.tensor_parallel.regions import Dropouts, change_first, change_output
from neuron_accel.strategies.tensor_parallel.tp_region import SequenceFlow, TpRegion

if TYPE_CHECKING:
    from neuron_accel.contract import ParameterMap, PreparedModel, Run


# ---- Activations between tensor-parallel regions, sharded along the sequence -----------------------------------------
# Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.2.
@dataclass(frozen=True, kw_only=True)
class SequenceParallelPlugin(StrategyPlugin):
    """Shards the activations between attention and feed-forward layers (residual stream, norms, dropout) along the
    sequence, over the ranks of the tensor-parallel axis.

    From the first block's input to the final norm each rank has a shard of the positions, so that activations take
    1 / degree of the memory there. Positions, rotary tables and masks are computed on full sequences. A length that is
    not divisible is padded inside. Batch-first models: dim 1 is the sequence.

    Args:
        overlap_gather: whether the column-wise layers of a region (q, k and v; gate and up) compute the products of
            this rank's positions while those of other ranks are being gathered, and the gradients of their weights
            while that of their input is reduced. Results are equal up to rounding, and memory and bytes sent are the
            same. ``accelerator.explain`` shows in which regions; the others are gathered first. Not available on XLA
            devices, whose compiler orders what is in a graph.
        regather: whether these layers keep this rank's shard of their input instead of all of it, and gather it again
            in the backward pass, while the gradient of the input is computed: one more all-gather in each region. Not
            under torch.compile.
        hooks_on_shards: whether hooks of your own on modules whose activations are sharded are called with this rank's
            shard of the sequence. If not, a forward pass of a model that has such hooks raises an error.
    """

    overlap_gather: bool = False
    regather: bool = True
    hooks_on_shards: bool = False

    spec = PluginSpec(
        name="sequence_parallel",
        api_version=4,
        phase=Phase.ACTIVATIONS,
        requires=frozenset({"axis:tp"}),
        provides=frozenset({"weights-in-passes"}),
    )

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Shards activations between regions along the sequence.

        Raises:
            PlanError: if the model is not sharded by tensor parallelism, or ``overlap_gather`` is set on a device that
                executes graphs.
            UnsupportedModelError: if no plan covers it.
        """
        from neuron_accel.strategies.tensor_parallel.tp_region import tp_region_of

        if self.overlap_gather and run.backend.is_lazy:
            raise PlanError(
                "The input of a layer cannot be gathered while the layer computes.",
                where=f"plugin {self.spec.name!r}, overlap_gather=True, backend {run.backend.name!r}",
                why="this device compiles a step into one graph, which the compiler orders",
                fix="leave overlap_gather out",
            )
        tp_region = tp_region_of(model.module)
        if tp_region is None or tp_region.architecture is None:
            raise PlanError(
                f"Sequence parallelism found no tensor-parallel region in {type(model.module).__name__}.",
                where="plugin sequence_parallel",
                why="it shards the activations between such regions",
                fix="use it together with TensorParallelPlugin(tensor_parallel_size=...)",
            )
        flow = SequenceFlow(
            tp_region.backend, tp_region.group, overlap_gather=self.overlap_gather, regather=self.regather
        )
        shard_sequence(tp_region.architecture, tp_region, model.parameters, flow)
        if self.regather and any(plugin.spec.phase is Phase.MEMORY for plugin in run.plan.plugins):
            for _, region in tp_region.architecture.regions:
                wrap_forward(region, GatherLate())
        if not self.hooks_on_shards:
            plugins = {type(plugin).__module__.partition(".")[0] for plugin in run.plan.plugins}
            refuse_hooks(tp_region.architecture, frozenset(plugins))


# ---- Hooks of the user -----------------------------------------------------------------------------------------------
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = frozenset({"neuron_accel", "torch", "torch_xla", "transformers", "accelerate", "peft"})


def refuse_hooks(architecture: Architecture, plugins: frozenset[str]) -> None:
    """Makes calls of a model raise an error if a module whose activations are a shard of the sequence has a hook that
    neither a library nor a plugin has registered: a loss of what it sees would be another one on every rank.

    Args:
        architecture: the model.
        plugins: packages of the run's plugins.
    """
    libraries = _LIBRARIES | plugins
    seen = list(_with_shards(architecture))

    def refuse(_: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        for name, module in seen:
            for hook in (hook for hooks in _HOOKS for hook in getattr(module, hooks).values()):
                if _package_of(hook) not in libraries:
                    raise UsageError(
                        f"A hook on {name!r} would be called with a shard of the sequence.",
                        where=f"{getattr(hook, '__qualname__', type(hook).__name__)}, registered on {name!r}",
                        why="SequenceParallelPlugin shards the activations between attention and feed-forward layers, "
                        "so that the hook sees other positions on every rank",
                        fix="read hidden states with output_hidden_states=True, which gives all positions; leave "
                        "SequenceParallelPlugin out; or, for a hook that is to see this rank's positions, use "
                        "SequenceParallelPlugin(hooks_on_shards=True)",
                    )

    architecture.blocks[0][1].register_forward_pre_hook(refuse, prepend=True)


def _with_shards(architecture: Architecture) -> Iterator[tuple[str, nn.Module]]:
    """Yields FQN and module of the modules whose input or output is a shard of the sequence."""
    regions = [fqn for fqn, _ in architecture.regions]
    for fqn, block in architecture.blocks:
        for inner, module in block.named_modules():
            name = join_fqn(fqn, inner) if inner else fqn
            inside = any(name.startswith(region + ".") for region in regions)
            if not inside or is_row_parallel(module):
                yield name, module
    if architecture.plan.final_norm:
        yield architecture.last


def _package_of(hook: Any) -> str:
    """Returns the top-level package in which a hook is defined."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(getattr(hook, "__func__", hook), "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0]


# ---- Sharding the activations of a model -----------------------------------------------------------------------------
def shard_sequence(
    architecture: Architecture, tp_region: TpRegion, parameters: ParameterMap, flow: SequenceFlow
) -> None:
    """Shards the activations between a model's tensor-parallel regions along the sequence, from the input of the first
    block to the output of the final norm.

    Args:
        architecture: the model.
        tp_region: the region object that its regions share.
        parameters: receives the parameters whose gradients become sums over the axis.
        flow: what happens at entry and exit of its regions.

    Raises:
        UnsupportedModelError: if the model has no blocks, or modules in them mix positions.
    """
    users = architecture.block_names is not None
    if architecture.plan.sequence:
        named = "name them: {'blocks.*': 'block', ...}, or {'': 'block', ...} in a plan registered for their class; or "
        raise UnsupportedModelError(
            f"{type(architecture.owner).__name__} cannot be sharded along the sequence.",
            where=f"the plan of model type {architecture.model_type!r}",
            why=architecture.plan.sequence,
            fix=(named if users else "") + "leave SequenceParallelPlugin out",
        )
    blocks = [module for _, module in architecture.blocks]
    if not blocks:
        raise UnsupportedModelError(f"{type(architecture.owner).__name__} has no blocks to shard the sequence between.")
    if users:
        _refuse_mixing(architecture)
    tp_region.flow = flow
    stack = _Stack(blocks, tp_region, flow)
    blocks[0].register_forward_pre_hook(stack.enter, with_kwargs=True)
    architecture.last[1].register_forward_hook(stack.leave)
    architecture.base.register_forward_hook(stack.ended, always_call=True)
    if users:
        stack.watch(architecture)
    else:
        change_output(architecture, "hidden_states", flow.join, keep="last_hidden_state")
    mixing = _mixing_modules(architecture)
    for name, module in mixing:
        _give_full_sequence(name, module, flow)
    for name in _on_shards(architecture, [*architecture.regions, *mixing]):
        parameters.add_partial_axis(name, AXIS)


class _Stack:
    """The blocks and the final norm of one model, whose activations are shards of the sequence."""

    def __init__(self, blocks: list[nn.Module], tp_region: TpRegion, flow: SequenceFlow) -> None:
        self._tp_region, self._flow, self._dropouts = tp_region, flow, Dropouts(blocks)
        self._inside = False
        self._watches: list[RemovableHandle] = []

    def watch(self, architecture: Architecture) -> None:
        """Makes the first call of a model with a user's plan raise an error for modules with parameters that are called
        between its blocks: they would receive a shard of the sequence, and their gradients would not be summed."""
        names = [name for name, _ in architecture.blocks]
        for name, module in architecture.base.named_modules():
            in_block = any(name == block or name.startswith(f"{block}.") for block in names)
            if in_block or not any(True for _ in module.parameters(recurse=False)):
                continue

            def refuse(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                if self._inside:
                    raise UsageError(
                        f"{name!r} is called after the first block and before the end of the last one.",
                        where=f"the plan of {architecture.model_type}, whose blocks are {names[0]!r} to {names[-1]!r}",
                        why="between blocks a rank has a shard of the sequence",
                        fix="call it in a block, before or after all of them, or leave SequenceParallelPlugin out",
                    )

            self._watches.append(module.register_forward_pre_hook(refuse))

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Ranks have different positions, so their dropout must drop different elements.
        self._inside = True
        self._tp_region.randomness.begin(self._dropouts.active)
        return replace_hidden(args, kwargs, self._flow.split)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._inside:  # the norm is also applied before the blocks
            return output
        self._inside = False
        self._tp_region.randomness.end()
        return change_first(output, self._flow.join)

    def ended(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._inside = False
        self._tp_region.randomness.end()  # needed after an error in a block
        while self._watches:  # later calls are not checked: activation checkpointing calls modules in another order
            self._watches.pop().remove()


def _mixing_modules(architecture: Architecture) -> list[tuple[str, nn.Module]]:
    """Returns FQN and module of the unsharded modules in blocks that may compute across positions: all but norms."""
    regions, styled = [fqn for fqn, _ in architecture.regions], architecture.around_styles
    return [
        (join_fqn(block, name), module)
        for block, parts in architecture.blocks
        for name, module in _called(parts)
        if not any(
            region == join_fqn(block, name) or region.startswith(join_fqn(block, name) + ".") for region in regions
        )
        and join_fqn(block, name) not in styled
        and "norm" not in type(module).__name__.lower()
        and any(True for _ in module.parameters())
        and not any(is_row_parallel(inner) for inner in module.modules())
    ]


def _refuse_mixing(architecture: Architecture) -> None:
    """Raises an error for layers in the blocks of a user's model that compute across positions."""
    for block, parts in architecture.blocks:
        for name, module in parts.named_modules():
            if isinstance(module, (_ConvNd, _NormBase, nn.GroupNorm, nn.RNNBase)):
                raise UnsupportedModelError(
                    f"{join_fqn(block, name)!r} is a {type(module).__name__}.",
                    where=f"the plan of {architecture.model_type}",
                    why="it computes across positions of the sequence, of which a rank has a shard in a block",
                    fix="leave SequenceParallelPlugin out",
                )


def _called(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields name and module of the children of a block; for a ModuleList, which is not called itself, of the modules
    in it."""
    for name, child in block.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{inner}", module) for inner, module in _called(child))
        else:
            yield name, child


def _give_full_sequence(fqn: str, module: nn.Module, flow: SequenceFlow) -> None:
    """Installs hooks that give a module the full sequence, and shard its output. All ranks compute the same, and each
    has the full gradients of the module."""
    if Dropouts([module]).possible:
        raise UnsupportedModelError(
            f"{fqn!r} computes the same on every rank, and uses dropout.",
            why="ranks with different shards of a sequence drop different elements",
            fix="set its dropout to zero, or leave SequenceParallelPlugin out",
        )

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return replace_hidden(args, kwargs, flow.join)

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return change_first(output, flow.split)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


def _on_shards(architecture: Architecture, regions: list[tuple[str, nn.Module]]) -> list[str]:
    """Returns the FQNs of the parameters that are applied to a shard of the sequence, whose gradients are partial sums.

    Args:
        regions: FQN and module of the modules that receive the full sequence.
    """
    inside = set()
    for fqn, region in regions:
        # The bias of a row-wise projection is added after the exit of the region.
        after = {join_fqn(name, "bias") for name, module in region.named_modules() if is_row_parallel(module)}
        inside |= {join_fqn(fqn, name) for name, _ in region.named_parameters() if name not in after}
    for fqn, block in architecture.blocks:  # some regions end in a projection outside of the module in which they begin
        inside |= {
            join_fqn(fqn, join_fqn(name, "weight")) for name, module in block.named_modules() if is_row_parallel(module)
        }
    outer = [*architecture.blocks, *([architecture.last] if architecture.plan.final_norm else [])]
    names = [join_fqn(fqn, name) for fqn, module in outer for name, _ in module.named_parameters()]
    return [name for name in names if name not in inside]
