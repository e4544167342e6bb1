# SPDX-License-Identifier: Apache-2.0
"""ZeRO-1 without an accelerator: an optimizer wrapper with the interface of torch_xla's, on every backend.

:class:`ZeroRedundancyOptimizer` has the arguments and defaults of ``torch_xla.distributed.zero_redundancy_optimizer``.
Unlike torch_xla's, it shards the parameters as one flat buffer, so that short and 0-dim parameters need no padding; it
sends gradients in buckets; and with ``use_grad_acc_hook`` it accumulates this rank's shard of the gradients only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from neuron_accel.backends.base import Backend
from neuron_accel.backends.select import connect, settle
from neuron_accel.engine.optim.twin import checked_groups, make_optimizer_constructor_lazy
from neuron_accel.engine.plan.mesh import DATA_AXIS, AxisKind, AxisSpec, Mesh
from neuron_accel.engine.plan.plan import Plan
from neuron_accel.engine.runtime.run import PreparedModel, Run
from neuron_accel.engine.sharding.layout import Cut, Layout
from neuron_accel.engine.sharding.parameters import ParameterMap
from neuron_accel.engine.shards.optimizer import ShardedOptimizer
from neuron_accel.errors import ConfigurationError, UsageError
from neuron_accel.strategies.zero1.plugin import Zero1Plugin

_NORM_AXIS = "norm"
"""The mesh axis whose ranks hold different shards of the model, over which norms are summed."""
Ranks = Sequence[Sequence[int]]


class ZeroRedundancyOptimizer(ShardedOptimizer):
    """Shards an optimizer's state over ranks (ZeRO-1, Rajbhandari et al., 2020, arXiv:1910.02054).

    :meth:`step` averages gradients over the ranks.

    Args:
        params: parameters or parameter groups, as for any optimizer.
        optimizer_class: the optimizer to shard.
        optimizer_dtype: dtype of master weights and optimizer state; None: float32. A parameter with a wider dtype
            keeps its own.
        grad_clipping: whether every step clips gradients; the norm before clipping is ``optimizer.grad_norm``.
        max_norm: the global norm to clip to; None: 1.0.
        pin_layout: accepted for torch-xla scripts, without effect: collectives never pin a layout, as Neuron requires.
        sharding_groups: lists of ranks over which the state is sharded; all ranks by default.
        grad_norm_groups: lists of ranks over which the norm is also summed, for example tensor-parallel groups. A
            parameter counts as sharded over them if its attribute ``tensor_model_parallel`` is true, as in
            neuronx-distributed; other parameters are replicated over them and count once.
        lazy_init: accepted for torch-xla scripts, which call :meth:`init_zero` later, and without effect: unsharded
            optimizer state is never allocated.
        use_grad_acc_hook: whether to reduce gradients in every backward pass and accumulate this rank's shard of them.
            If False, gradients accumulate in ``parameter.grad`` and are reduced once, at :meth:`step`.
        higher_cc_precision: whether to reduce gradients in ``optimizer_dtype`` rather than in their own dtype.
        bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter: size of buckets in MiB, 0 for the default. One size
            serves both directions: the larger of the two.
        save_master_weights: whether ``state_dict`` contains the master weights.
        backend: the backend that connects the ranks; None: chosen as ``NeuronAccelerator`` does.
        defaults: options of ``optimizer_class``, such as ``lr``.

    Raises:
        ConfigurationError: if groups do not partition the ranks into groups of equal size.
        PlanError: if the optimizer does not update each element by itself (``Zero1Plugin(partition="parameters")``
            supports those).
        ValueError, TypeError: as torch, if ``params`` is empty or contains something that is not a tensor, not a leaf,
            or sparse.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Ranks | None = None,
        grad_norm_groups: Ranks | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: float = 0,
        bucket_cap_mb_reduce_scatter: float = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        *,
        backend: Backend | None = None,
        **defaults: Any,
    ) -> None:
        del pin_layout, lazy_init  # both are the case anyway
        optimizer = make_optimizer_constructor_lazy(optimizer_class)(params, **defaults)
        _refuse_sparse(optimizer.param_groups)
        parameters = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))
        run = _run(backend or _connected(), parameters, sharding_groups, grad_norm_groups)
        options = Zero1Plugin(
            optimizer_dtype=optimizer_dtype or torch.float32,
            max_norm=(1.0 if max_norm is None else max_norm) if grad_clipping else None,
            use_grad_acc_hook=use_grad_acc_hook,
            higher_cc_precision=higher_cc_precision,
            bucket_cap_mb=max(bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter) or Zero1Plugin.bucket_cap_mb,
            save_master_weights=save_master_weights,
        )
        # It is not known which micro-batch is the last, so gradients are reduced at the step, or by the hook.
        super().__init__(optimizer, run, **options.optimizer_options(), synchronises=lambda: False)

    def init_zero(self) -> None:
        """Copies the parameters' current values to the master weights, for scripts that load weights after the
        constructor."""
        self.reload_masters()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group and shards its state. Collective.

        Args:
            param_group: the group, as for any optimizer.
        """
        group = checked_groups([param_group])[0]
        _refuse_sparse([group])
        _take_note(group["params"], self._run)
        super().add_param_group(group)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Reduces gradients over ranks, updates this rank's shard, and gathers the weights.

        Collective.

        Args:
            closure: runs forward and backward and returns the loss; called once, before the update.
            options: further arguments of the step of ``optimizer_class``.

        Raises:
            UsageError: for ``sharding_scheme``, an argument of torch_xla's.
        """
        if "sharding_scheme" in options:
            raise UsageError(
                "`sharding_scheme` is not supported.",
                where="ZeroRedundancyOptimizer.step",
                why="the ranks over which state is sharded are set in the constructor",
                fix="pass `sharding_groups` to the constructor",
            )
        return super().step(closure, **options)

    def flush(self) -> None:
        """Reduces ``parameter.grad`` over the ranks now, also gradients that were not computed by autograd."""
        if any(shard.has_unreduced for shard in self.shards):
            self._watcher.owe()
        super().flush()


def _connected() -> Backend:
    return connect(settle(os.environ))


def _run(
    backend: Backend, parameters: Sequence[nn.Parameter], sharding_groups: Ranks | None, norm_groups: Ranks | None
) -> Run:
    """A run without plugins, with a data axis and a model axis for ``norm_groups``."""
    everyone = tuple(range(backend.world_size))
    sharding = _partition(sharding_groups or [everyone], everyone, "sharding_groups")
    norms = _partition(norm_groups or [[rank] for rank in everyone], everyone, "grad_norm_groups")
    data = AxisSpec(name=DATA_AXIS, degree=len(sharding[0]), kind=AxisKind.DATA)
    model = AxisSpec(name=_NORM_AXIS, degree=len(norms[0]), kind=AxisKind.MODEL)
    run = Run(plan=Plan(mesh=Mesh((data, model)), plugins=(), owners={}), backend=backend)
    run.set_groups((DATA_AXIS,), sharding)
    run.set_groups((_NORM_AXIS,), norms)
    run.set_groups((DATA_AXIS, _NORM_AXIS), _joined(sharding, norms))
    run.models.append(PreparedModel(original=nn.Module(), module=nn.Module(), parameters=ParameterMap([])))
    _take_note(parameters, run)
    return run


def _take_note(parameters: Iterable[nn.Parameter], run: Run) -> None:
    """Adds to the run the parameters that it does not contain yet, named by their number."""
    records, degree = run.models[0].parameters, run.mesh.degree(_NORM_AXIS)
    for parameter in parameters:
        if records.find(parameter) is None:
            record = records.add(f"parameters.{len(records)}", parameter)
            if degree > 1 and getattr(parameter, "tensor_model_parallel", False):
                record.layout = _cut_layout(record.layout, getattr(parameter, "partition_dim", 0), degree)


def _refuse_sparse(groups: Iterable[dict[str, Any]]) -> None:
    """Raises ValueError, as torch's own ZeroRedundancyOptimizer does."""
    for parameter in (p for group in groups for p in group["params"]):
        if parameter.layout != torch.strided:
            raise ValueError(
                "ZeroRedundancyOptimizer only supports dense parameters, but one of the params is "
                f"{parameter.layout} of shape {tuple(parameter.shape)}"
            )


def _cut_layout(local: Layout, dim: int, degree: int) -> Layout:
    shape = list(local.shape)
    shape[dim] *= degree
    cut = Cut(dim=dim, axis=_NORM_AXIS, degree=degree, size=shape[dim])
    return Layout(shape=tuple(shape), dtype=local.dtype, cuts=(cut,))


def _partition(groups: Ranks, everyone: tuple[int, ...], name: str) -> list[tuple[int, ...]]:
    result = sorted(tuple(sorted(group)) for group in groups)
    if sorted(rank for group in result for rank in group) != list(everyone) or len({len(g) for g in result}) != 1:
        raise ConfigurationError(
            f"{name} is {[list(g) for g in groups]}.",
            where="ZeroRedundancyOptimizer",
            why=f"each of the {len(everyone)} ranks must be in exactly one group, and groups must be of equal size",
            fix="pass one list of ranks per group, with every rank in one of them",
        )
    return result


def _joined(first: Ranks, second: Ranks) -> list[tuple[int, ...]]:
    """The finest partition in which each group of ``first`` and of ``second`` is contained in one part."""
    parts = [set(group) for group in first]
    for group in second:
        touching = [part for part in parts if part & set(group)]
        parts = [part for part in parts if part not in touching] + [set().union(*touching)]
    return sorted(tuple(sorted(part)) for part in parts)
