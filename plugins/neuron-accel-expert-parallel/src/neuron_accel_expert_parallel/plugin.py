# SPDX-License-Identifier: Apache-2.0
"""The plugin: its options and hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from neuron_accel.contract import AxisKind, AxisSpec, Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import ConfigurationError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.contract import ParameterMap, PreparedModel, Run
    from neuron_accel_expert_parallel.dispatch import Dispatcher

AXIS = "ep"
"""The mesh axis of expert parallelism, one of samples."""

_LLAMA4 = "transformers.models.llama4.modeling_llama4"
"""Imported where there is a model of Llama 4."""


@dataclass(frozen=True, kw_only=True)
class ExpertParallelPlugin(StrategyPlugin):
    """Shards the experts of each layer over ``expert_parallel_size`` ranks with other samples.

    Tokens are sent to the ranks of their experts and their results back, by all-to-all with as many rows as there are:
    none is dropped, and none is padded unless the device needs it. Routers, shared experts and all other layers are
    replicated, and their gradients are averaged, as in data parallelism. Load-balancing losses are those of the tokens
    of all ranks.

    Args:
        expert_parallel_size: number of ranks that hold the experts of a layer between them; divides the number of
            experts.
        experts: patterns of the names of the modules of experts, each compared with the end of a name, ``*`` for one
            component. Needed for models that are not of a known family.
        capacity_factor: if given, each rank sends each expert at most this multiple of the mean number of tokens of an
            expert, in buffers of that size; tokens above it skip the expert. By default none is dropped; on devices
            that need shapes that are known before the values are (XLA, the native Neuron device), buffers then have a
            row for each token.

    Raises:
        ConfigurationError: if ``expert_parallel_size`` is not an integer of at least 1, or ``capacity_factor`` not
            positive.
    """

    expert_parallel_size: int
    experts: tuple[str, ...] = ()
    capacity_factor: float | None = None

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="expert_parallel",
        api_version=4,
        phase=Phase.LAYOUT,
        after=frozenset({"tensor_parallel"}),
        provides=frozenset({"gathered-weights"}),
        lazy_load=True,
    )

    @classmethod
    def layouts(cls, space: Any) -> Iterable[StrategyPlugin]:
        """The divisors of the number of experts, up to a machine."""
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        experts = next((value for name in names if isinstance(value := getattr(space.config, name, None), int)), 0)
        sizes = [size for size in (2, 4, 8, 16, 32, 64) if experts % size == 0 and size <= experts]
        fitting = [size for size in sizes if space.replicas % size == 0 and size <= space.ranks_per_host]
        return [cls(expert_parallel_size=size) for size in fitting]

    def __post_init__(self) -> None:
        if type(self.expert_parallel_size) is not int or self.expert_parallel_size < 1:
            raise ConfigurationError(
                f"expert_parallel_size is {self.expert_parallel_size!r}.",
                where="plugin expert_parallel",
                fix="pass an integer of at least 1",
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ConfigurationError(
                f"capacity_factor is {self.capacity_factor!r}.",
                where="plugin expert_parallel",
                fix="pass a positive number, such as 1.25, or leave it out to drop no token",
            )
        object.__setattr__(self, "experts", tuple(self.experts))

    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name=AXIS, degree=self.expert_parallel_size, kind=AxisKind.DATA),)

    def setup(self, run: Run) -> None:
        run.group(AXIS)  # created now, in the same order on every rank
        run.group(*run.mesh.gradient_axes)

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Keeps this rank's experts.

        Raises:
            UnsupportedModelError: if the experts are not found, do not have the form of experts, or cannot be
                distributed evenly; the model is then unchanged.
        """
        degree = run.mesh.degree(AXIS)
        if degree == 1:
            return
        from neuron_accel_expert_parallel.auxiliary import make_auxiliary_losses_exact
        from neuron_accel_expert_parallel.dispatch import RowDispatcher
        from neuron_accel_expert_parallel.families import find_experts
        from neuron_accel_expert_parallel.padded import PaddedDispatcher, check_form

        modules: dict[str, Any] = find_experts(model.module, self.experts)
        for name, module in modules.items():
            if module.num_experts % degree:
                raise UnsupportedModelError(
                    f"{name!r} has {module.num_experts} experts.",
                    where="plugin expert_parallel",
                    why=f"{degree} ranks cannot hold equally many of them",
                    fix=f"choose an expert_parallel_size that divides {module.num_experts}",
                )
        if _LLAMA4 in sys.modules:
            from neuron_accel_expert_parallel.llama4 import call_with_chosen_tokens

            call_with_chosen_tokens(model.module)
        padded = self.capacity_factor is not None or not run.backend.has_uneven_all_to_all
        if padded:
            for name, module in modules.items():
                check_form(name, module)
        dispatchers: list[Dispatcher] = []
        for name, module in modules.items():
            experts = module.num_experts
            shard_experts(module, model.parameters, run)
            arguments = name, module, experts, run.backend, run.group(AXIS), run.join
            if padded:
                dispatchers.append(PaddedDispatcher(*arguments, capacity_factor=self.capacity_factor))
            else:
                dispatchers.append(RowDispatcher(*arguments))
        make_auxiliary_losses_exact(model.module, run.backend, run.group(*run.mesh.gradient_axes))
        run.state(self).setdefault("models", []).append((model, dispatchers))

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        """Describes what a layer sends, and the load of this rank's tokens so far."""
        dispatchers = dispatchers_of(run, model.module)
        if not dispatchers:
            return ""
        first, degree = dispatchers[0], run.mesh.degree(AXIS)
        lines = [
            f"Expert parallelism over {degree} ranks: {first.local} of {first.experts} experts on each, in "
            f"{len(dispatchers)} layers",
            f"  {first.explain()}",
        ]
        for each in dispatchers:
            total = int(each.tokens.sum()) if each.tokens.device.type != "meta" else 0
            if total:
                busiest = int(each.tokens.argmax())
                share, unused = int(each.tokens[busiest]) / total, int((each.tokens == 0).sum())
                lines.append(
                    f"  {each.name}: of this rank's {total:,} choices {share:.0%} are of expert {busiest}, the most "
                    f"chosen; {unused} experts are not chosen"
                )
        return "\n".join(lines)


def shard_experts(module: nn.Module, parameters: ParameterMap, run: Run) -> None:
    """Keeps this rank's experts in a module of experts, and says so in the layouts of its parameters, which may be
    sharded along other dims already."""
    from torch import nn

    from neuron_accel.contract import Cut, Layout

    experts, degree = int(module.num_experts), run.mesh.degree(AXIS)  # type: ignore[arg-type]
    cut = Cut(dim=0, axis=AXIS, degree=degree, size=experts)
    for holder in module.modules():
        for name, parameter in list(holder.named_parameters(recurse=False)):
            record = parameters.find(parameter)
            assert record is not None
            parameters.set_layout(record.fqn, replace(record.layout, cuts=(*record.layout.cuts, cut)))
            shard = replace(Layout.of(parameter), cuts=(cut,)).shard(parameter.detach(), run.coordinates)
            holder.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    module.num_experts = experts // degree  # type: ignore[assignment]  # torch: Tensor | Module


def dispatchers_of(run: Run, model: nn.Module) -> list[Dispatcher]:
    """The dispatchers of a prepared model, one for each module of experts; empty if it has none."""
    prepared = run.prepared(model)
    states = [run.state(plugin) for plugin in run.plan.plugins if isinstance(plugin, ExpertParallelPlugin)]
    models = [entry for state in states for entry in state.get("models", [])]
    return next((dispatchers for owner, dispatchers in models if owner is prepared), [])
