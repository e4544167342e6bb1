# SPDX-License-Identifier: Apache-2.0
"""Preparing models and optimizers: the order in which the hooks of the plugins are called, and the steps between.

``NeuronAccelerator.prepare_model`` and ``prepare_optimizer`` call these functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from neuron_accel.checkpoint.state.training import random_state, set_random_state
from neuron_accel.data.shared import sharing_group
from neuron_accel.engine.optim.full_parameter import full_parameter_step
from neuron_accel.engine.optim.state import rebind
from neuron_accel.engine.optim.twin import StandIn, build_deferred, translate
from neuron_accel.engine.plan.plugin import Phase
from neuron_accel.engine.runtime.run import PreparedModel, Run, transform_model
from neuron_accel.engine.runtime.tensors import broadcast_tensors, full_tensor, place, state_tensors
from neuron_accel.engine.sharding.parameters import ParameterMap, ParameterRecord
from neuron_accel.errors import UsageError
from neuron_accel.lazy.filling import give_memory, origin_of, read_rest
from neuron_accel.loop.gradient_checkpointing import recompute_layers
from neuron_accel.loop.unprepared import watch_optimizers


# ---- models ----------------------------------------------------------------------------------------------------------
def prepare_model(
    model: nn.Module,
    run: Run,
    *,
    device: torch.device | None,
    wrap: Callable[[nn.Module], nn.Module],
    load: Callable[[PreparedModel], None],
    training: bool,
    with_optimizer: bool = False,
) -> PreparedModel:
    """Broadcasts a model from the first rank, lets the plugins rewrite it, and moves it to its device. Collective.

    Ranks that read the same samples take over the random state of the first of them, so that a seed that differs
    between all processes (Accelerate's ``set_seed(seed, device_specific=True)``) differs between data-parallel ranks.

    Args:
        model: the model as the user built it.
        run: the run; the record that is returned is added to its models.
        device: device to which parameters and buffers are moved once the model is sharded; None: not moved.
        wrap: Accelerate's casting and compiling of a module on its device.
        load: loads into the sharded model the weights that a plugin specifies, if one does.
        training: False for a model that is only evaluated, whose gradients are not reduced.
        with_optimizer: whether optimizers are prepared next, and :func:`finish` is called then. A plugin may then read
            the weights of a model that was built without memory for them itself.

    Returns:
        the record of the prepared model.

    Raises:
        UsageError: if the model was compiled by ``torch.compile``.
        NeuronAccelError: any error that a plugin raises.
    """
    if hasattr(model, "_orig_mod"):
        raise UsageError(
            f"This {type(model._orig_mod).__name__} was compiled by torch.compile before it was prepared.",
            where="prepare(model)",
            why="strategies find layers and parameters by names, which compiling has changed",
            fix="prepare the model first and compile the model that prepare returns, or pass a dynamo_plugin",
        )
    if run.backend.device.type == "neuron" and not run.models:
        from torch._dynamo import config

        # Without it a second shape of a batch makes torch.compile ask for symbolic sizes, which the device refuses.
        run.until_released.enter_context(config.patch(automatic_dynamic_shapes=False))
    if run.backend.world_size > 1 and not run.models:
        watch_optimizers(run)
    origin = origin_of(model, run) if run.backend.has_values else None
    broadcast_tensors(state_tensors(model), run, run.world)
    share_random_state(run)
    record = PreparedModel(
        original=model, module=model, parameters=ParameterMap(model, mesh=run.mesh), optimizable=training
    )
    run.models.append(record)
    hooked = hooked_parameters(record)
    transform_model(record, run, before=Phase.GRADIENTS)
    if origin is not None:
        reads_itself = any(plugin.spec.reads_weights for plugin in run.plan.plugins)
        give_memory(origin, record, run, later=reads_itself and training and with_optimizer and device is not None)
    if device is not None:
        place(record.module, device, record.parameters)
    record.module = wrap(record.module)
    record.parameters.follow(record.inner)
    carry_hooks(hooked, run)
    load(record)
    if run.events.of["part"]:
        record.make_events(run.events)
    record.handles += run.shared_inputs.watch(record.module)
    if training:
        transform_model(record, run, since=Phase.GRADIENTS)
        record.handles.append(record.module.register_forward_pre_hook(record.set_synchronises))
        record.watch_changes(partial(_refuse_joined, run))
        if run.backend.is_lazy and (handle := recompute_layers(record.module, run.backend)) is not None:
            record.handles.append(handle)
        if not hasattr(record.module, "no_sync"):
            record.module.no_sync = NoSync(record)  # type: ignore[assignment]  # a callable, as DDP's method is
    _offer_as_ddp(record, run)
    return record


def _offer_as_ddp(record: PreparedModel, run: Run) -> None:
    """Sets ``module`` and ``device``, which a DistributedDataParallel has, on several ranks, where Accelerate makes
    one."""
    if run.backend.world_size > 1:
        given = {"module": record.inner, "device": run.device}
        offered = {name: value for name, value in given.items() if not hasattr(record.inner, name)}
        vars(record.inner).update(offered)
        record.handles.append(_Offered(record.inner, tuple(offered)))


@dataclass(frozen=True)
class _Offered:
    """A handle of attributes that a model has while it is prepared."""

    model: nn.Module
    names: tuple[str, ...]

    def remove(self) -> None:
        for name in self.names:
            vars(self.model).pop(name, None)


def _refuse_joined(run: Run, record: PreparedModel) -> bool:
    """Raises an error if parameters joined the model that train; returns whether some did that do not."""
    if run.backend.world_size == 1:
        return False
    joined = {name: p for name, p in record.inner.named_parameters() if run.find_parameter(p) is None}
    if new := [name for name, parameter in joined.items() if parameter.requires_grad]:
        raise UsageError(
            f"{new[0]!r} is a parameter that was added to {type(record.original).__name__} after `prepare`.",
            where=f"the first forward pass with it; {len(new)} such parameters",
            why="its gradient would not be reduced, and the copies of it on the ranks would drift apart",
            fix="add it before `prepare`, or call accelerator.free_memory() and prepare the model and a new optimizer "
            "again; a parameter that is not trained may be added with requires_grad=False",
        )
    return bool(joined)


def hooked_parameters(record: PreparedModel) -> list[tuple[ParameterRecord, nn.Parameter, dict[int, Any]]]:
    """The parameters to which a loop has attached hooks, with those for their gradients."""
    return [
        (each, parameter, dict(_hooks_of(parameter)))
        for each in record.parameters
        if (parameter := each.current) is not None and (_hooks_of(parameter) or parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
    ]


def _hooks_of(parameter: torch.Tensor) -> dict[int, Any]:
    return parameter._backward_hooks or {}


def carry_hooks(hooked: list[tuple[ParameterRecord, nn.Parameter, dict[int, Any]]], run: Run) -> None:
    """Attaches hooks to the parameters by which a plugin has replaced those that had them. They see the gradient that
    the parameter of the original model would have.

    Raises:
        UsageError: for a hook that would see a shard.
    """
    for record, before, hooks in hooked:
        parameter = record.current
        if parameter is None or (parameter is before and not record.partial_axes):
            continue
        if parameter is not before and before._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            raise UsageError(
                f"The post-accumulate hook of {record.fqn!r} would see one rank's shard.",
                where="prepare(model)",
                why="it was registered on the full parameter, which a plugin has replaced by a shard",
                fix="register it on the parameter of the prepared model, for its shard, or use `register_hook`, which "
                "sees the full gradient",
            )
        if parameter is before:  # each in its place, from where its handle removes it
            known = _hooks_of(before)
            known.update({key: _OnFull(known, {key: hook}, record, run) for key, hook in hooks.items()})
        elif hooks:
            trains = parameter.requires_grad
            parameter.requires_grad_(True).register_hook(_OnFull(_hooks_of(before), hooks, record, run))
            parameter.requires_grad_(trains)


class _OnFull:
    """Calls hooks with the full gradient of a parameter of which ranks have shards or partial sums. Collective.

    Args:
        registered: the hooks of the parameter on which they were registered, from which they may be removed.
        hooks: the hooks.
        record: the parameter.
        run: the run.
    """

    def __init__(self, registered: Mapping[int, Any], hooks: dict[int, Any], record: ParameterRecord, run: Run) -> None:
        self._registered, self._hooks, self._record, self._run = registered, hooks, record, run

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        record, run = self._record, self._run
        hooks = [hook for key, hook in self._hooks.items() if key in self._registered]
        if not hooks:
            return None
        group = run.group(*record.partial_axes)
        full = run.backend.all_reduce(gradient.clone(), group) if group.size > 1 else gradient
        full = full_tensor(full, record.layout, run).to(gradient.device)
        for hook in hooks:
            result = hook(full)
            full = full if result is None else result
        return record.layout.shard(full, run.coordinates) / group.size


def share_random_state(run: Run) -> None:
    """Sets the random state of ranks that read the same samples to that of the first of them. Collective. On a lazy
    device only the device's: ranks may be threads, which share the others."""
    group, generator = sharing_group(run), run.backend.generator
    if group.size == 1 or not run.backend.has_values:
        return
    if run.backend.is_lazy:
        generator.set_state(run.backend.broadcast_object(generator.get_state(), group))
    else:
        set_random_state(run.backend.broadcast_object(random_state(generator), group), generator)


def finish(run: Run) -> None:
    """Models and their optimizers are prepared: reads the weights that no plugin has read. Collective."""
    for record in run.models:
        read_rest(record, run)


def release(run: Run, kept: Sequence[PreparedModel] = ()) -> None:
    """Ends what the plugins do with the models and optimizers of a run, and drops them, but for the models ``kept``."""
    run.end()
    for optimizer in run.optimizers:
        if optimizer.lazy is not None:
            optimizer.lazy.close()
    for record in run.models:
        if not any(record is each for each in kept):
            _let_go(record)
    run.forget(kept)
    if not kept:
        run.until_released.close()


def _let_go(record: PreparedModel) -> None:
    """Removes the hooks of a prepared model, and Accelerate's changes to it. A model that no plugin sharded can then be
    prepared again."""
    for module in (record.original, record.module):
        vars(module).pop("_neuron_accel_owner", None)
    for handle in record.handles:
        handle.remove()
    if any(r.layout.cuts or r.holders or r.weights for r in record.parameters):
        return
    if isinstance(vars(record.module).get("no_sync"), NoSync):
        del record.module.no_sync  # it refers to the record of this run
    extract_model_from_parallel(record.module, keep_fp32_wrapper=False)
    for module in (record.original, record.module):
        module._is_accelerate_prepared = False  # type: ignore[assignment]


class NoSync:
    """The ``no_sync`` of a prepared model, as of DistributedDataParallel: a context manager that disables gradient
    reduction for the backward passes of forward passes run in it.

    In a copy of the model, whose gradients are not reduced, it does nothing.
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
    """Replaces an optimizer's parameters by the rewritten ones and lets the plugins transform it.

    Args:
        optimizer: the user's optimizer.
        run: the run.
        number: how many optimizers were prepared before; part of the names of parameters that no model has.

    Returns:
        the transformed optimizer.

    Raises:
        ParameterError: if it holds a parameter that belongs to no prepared model, on several ranks.
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
    """Adds an optimizer's parameters that belong to no prepared model to the run, with a warning, if there is one rank;
    on several ranks their gradients would not be reduced."""
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
            f"{type(optimizer).__name__} holds {len(named)} parameters that belong to no prepared model. They are "
            "trained, because there is one process; on several processes this is an error. `save_state` saves the "
            "optimizer's state for them, but not the parameters: prepare their model with the optimizer.",
            stacklevel=5,
        )


def _carry_over(optimizer: torch.optim.Optimizer, before: list[nn.Parameter], run: Run) -> None:
    """Copies attributes that were set on parameters, and references that an optimizer keeps to them, to the parameters
    by which a plugin has replaced them."""
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
