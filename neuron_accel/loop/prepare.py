"""How objects are prepared, in order: a model, then what belongs to it.

``NeuronAccelerator.prepare`` calls these functions. Strategies do the work in their hooks; here is only what happens
around them, and when.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from neuron_accel.engine.optim.full_parameter import full_parameter_step
from neuron_accel.engine.optim.twin import StandIn, build_deferred, translate
from neuron_accel.engine.plan.plugin import Phase
from neuron_accel.engine.runtime.run import PreparedModel, Run, transform_model
from neuron_accel.engine.runtime.tensors import broadcast_tensors, place, state_tensors
from neuron_accel.engine.sharding.parameters import ParameterMap, rebind
from neuron_accel.errors import UsageError
from neuron_accel.lazy.filling import give_memory, origin_of
from neuron_accel.loop.gradient_checkpointing import recompute_layers


# ---- models ----------------------------------------------------------------------------------------------------------
def prepare_model(
    model: nn.Module,
    run: Run,
    *,
    device: torch.device | None,
    wrap: Callable[[nn.Module], nn.Module],
    load: Callable[[PreparedModel], None],
    training: bool,
) -> PreparedModel:
    """Lets the plugins rewrite a model. Collective.

    Args:
        model: as the user built it.
        run: the run, which keeps the record that is returned.
        device: where parameters and buffers go once the model is sharded; None: they stay.
        wrap: what Accelerate does to a module on its device: casts, compiles.
        load: gives the sharded model the weights that a plugin names.
        training: False for a model that is only evaluated, which takes no part in the reduction of gradients.

    Raises:
        UsageError: if ``torch.compile`` has compiled the model already.
        NeuronAccelError: what a plugin raises.
    """
    if hasattr(model, "_orig_mod"):
        raise UsageError(
            f"This {type(model._orig_mod).__name__} was compiled by torch.compile before it was prepared.",
            where="prepare(model)",
            why="strategies replace layers and parameters, by names that compiling has changed",
            fix="prepare the model first and compile what prepare returns, or give a dynamo_plugin",
        )
    origin = origin_of(model, run)
    broadcast_tensors(state_tensors(model), run, run.world)
    record = PreparedModel(
        original=model, module=model, parameters=ParameterMap(model, mesh=run.mesh), optimizable=training
    )
    run.models.append(record)
    transform_model(record, run, before=Phase.GRADIENTS)
    if origin is not None:
        give_memory(origin, record, run)
    if device is not None:
        place(record.module, device, record.parameters)
    record.module = wrap(record.module)
    record.parameters.follow(record.inner)
    load(record)
    if training:
        transform_model(record, run, since=Phase.GRADIENTS)
        record.handles.append(record.module.register_forward_pre_hook(record.settle_synchronisation))
        if run.backend.is_lazy and (handle := recompute_layers(record.module, run.backend)) is not None:
            record.handles.append(handle)
        if not hasattr(record.module, "no_sync"):
            record.module.no_sync = NoSync(record)  # type: ignore[assignment]  # a callable, as DDP's method is
    return record


def let_go(record: PreparedModel, unwrap: Callable[[nn.Module], object]) -> None:
    """Removes what preparing a model has put on it; one that no plugin sharded can be prepared again.

    Args:
        unwrap: undoes what Accelerate did to a module.
    """
    for handle in record.handles:
        handle.remove()
    if any(r.layout.cuts or r.holders for r in record.parameters):
        return
    if isinstance(vars(record.module).get("no_sync"), NoSync):
        del record.module.no_sync  # it would steer this run's record, not the next one's
    unwrap(record.module)
    for module in (record.original, record.module):
        module._is_accelerate_prepared = False  # type: ignore[assignment]


class NoSync:
    """``model.no_sync()``, as loops written for DistributedDataParallel call it: forward passes inside lead to backward
    passes that do not sum gradients over ranks.

    It belongs to one prepared model; in a copy of that model, which is not synchronised, it does nothing.
    """

    def __init__(self, model: PreparedModel | None = None) -> None:
        self._model = model

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._model is None:
            yield
            return
        previous, self._model.sync_enabled = self._model.sync_enabled, False
        try:
            yield
        finally:
            self._model.sync_enabled = previous

    def __reduce__(self) -> Any:
        return NoSync, ()


# ---- optimizers ------------------------------------------------------------------------------------------------------
def prepare_optimizer(optimizer: torch.optim.Optimizer, run: Run, *, number: int) -> torch.optim.Optimizer:
    """Gives an optimizer the rewritten parameters and lets the plugins transform it.

    Args:
        number: of optimizers that were prepared before, for names.

    Raises:
        ParameterError: if it holds a parameter of no prepared model, and there are several ranks.
    """
    _admit_unprepared(optimizer, run, number)
    before = [p for group in optimizer.param_groups for p in group["params"]]
    rebind(optimizer, run.parameter_maps, run.coordinates)
    _carry_over(optimizer, before, run)
    optimizer = run.hooks.transform("transform_optimizer", optimizer, run)
    optimizer = full_parameter_step(optimizer, run)
    build_deferred(optimizer)
    return optimizer


def _admit_unprepared(optimizer: torch.optim.Optimizer, run: Run, number: int) -> None:
    """In one process an optimizer may hold parameters of models that were not prepared: there is no other rank to
    synchronise them with."""
    if run.backend.world_size > 1:
        return
    named = [
        (f"optimizer {number}, group {i}, parameter {j}", parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
        if run.find_parameter(parameter) is None
    ]
    if named:
        run.unprepared.append(ParameterMap(named))
        warnings.warn(
            f"{type(optimizer).__name__} holds {len(named)} parameters that no prepared model has. They are "
            "trained, because there is one process; on several it is an error. `save_state` saves the optimizer's "
            "state for them, and not the parameters: prepare their model with the optimizer.",
            stacklevel=5,
        )


def _carry_over(optimizer: torch.optim.Optimizer, before: list[nn.Parameter], run: Run) -> None:
    """What was set on parameters, and what an optimizer keeps by parameter, holds for those that a plugin has put in
    their place."""
    stand_ins: dict[torch.Tensor, list[StandIn]] = {}
    for parameter in before:
        record = run.find_parameter(parameter)
        if record is not None and record.current is not None and record.current is not parameter:
            cut = partial(record.layout.shard, coordinates=run.coordinates)
            stand_in = StandIn(record.current, cut)
            stand_ins[parameter] = [stand_in]
            for name, value in vars(parameter).items():
                vars(record.current).setdefault(name, stand_in.value(value, parameter))
    if stand_ins:
        translate(optimizer, stand_ins)
