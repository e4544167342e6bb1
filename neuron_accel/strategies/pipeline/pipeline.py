# SPDX-License-Identifier: Apache-2.0
"""The forward of a pipelined model: in training forward and backward of all micro-batches, else forward only."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from neuron_accel.errors import UsageError
from neuron_accel.strategies.pipeline.deferred_wgrad import DeferredWgrad
from neuron_accel.strategies.pipeline.execution import (
    Call,
    Execution,
    Failure,
    NeighbourFailed,
    P2PExecution,
    RingExecution,
    StageFailed,
)
from neuron_accel.strategies.pipeline.microbatches import LossWeights, batch_size, signature, split
from neuron_accel.strategies.pipeline.outputs import (
    broadcast_outputs,
    expected_kind,
    kind_of,
    loss_of,
    merge_outputs,
    of_loss,
)
from neuron_accel.strategies.pipeline.p2p import P2P, RingShift
from neuron_accel.strategies.pipeline.schedules import make_schedule
from neuron_accel.strategies.pipeline.stubs import FirstStageLayer, Skipped

if TYPE_CHECKING:
    from neuron_accel.contract import Group, PreparedModel, Run
    from neuron_accel.strategies.pipeline.options import PipelineOptions
    from neuron_accel.strategies.pipeline.schedules import Schedule
    from neuron_accel.strategies.pipeline.stage import Stage
    from neuron_accel.strategies.pipeline.tied_weights import Ties

_CACHES = ("past_key_values", "cache")  # before and since transformers 5.24
_ALL_LAYERS = ("output_hidden_states", "output_attentions", "output_router_logits")


class Pipeline:
    """Runs a model whose stages are on several ranks. Its :meth:`call` takes the place of the model's forward.

    Args:
        model: the model, of which this rank has its stages.
        stages: these stages.
        forward: the model's own forward.
        run: the run.
        axis: the mesh axis of the pipeline.
        ties: weights that several stages share.
        options: the schedule, number of micro-batches and so on.
    """

    def __init__(
        self,
        model: PreparedModel,
        stages: list[Stage],
        forward: Callable[..., Any],
        *,
        run: Run,
        axis: str,
        ties: Ties,
        options: PipelineOptions,
    ) -> None:
        self._model, self._record, self._run, self.ties = model.module, model, run, ties
        self._options = options
        self._stages = {stage.index: stage for stage in stages}
        self._group = run.group(axis)
        self._replicas = run.group(*run.mesh.gradient_axes)
        self._everyone = run.group(axis, *run.mesh.gradient_axes)
        self._action = run.join.register("the end of a pipeline's step", self._without_data)
        self._make_step: Callable[..., Execution]
        if run.backend.has_point_to_point:
            self._make_step = functools.partial(P2PExecution, P2P(run.backend, self._group))
        else:
            self._make_step = functools.partial(
                RingExecution, RingShift(run.backend, self._group, self._everyone), run.backend
            )
        get_base_model: Any = getattr(model.module, "get_base_model", None)  # adapters wrap a model
        inner: nn.Module = model.module if get_base_model is None else get_base_model()
        self._weights = LossWeights(inner, forward)
        self._deferred_wgrad = DeferredWgrad() if options.schedule == "zero-bubble" else None
        if self._deferred_wgrad is not None:
            self._deferred_wgrad.attach(model.module)
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self.most_in_flight = 0
        """The largest number of micro-batches whose activations this rank kept at a time in the last training step."""

    def call(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Is called in place of the forward of the model, and of a copy of it, which can be evaluated.

        Args:
            model: the model or its copy.
            forward: its own forward.
            args, kwargs: of the call.

        Raises:
            UsageError: for training of a copy, and for copies where a rank has several stages.
        """
        pipeline = self if model is self._model else self._of_copy(model, forward)
        pipeline._check(kwargs)
        if model.training and torch.is_grad_enabled():
            return pipeline._train(args, kwargs)
        with torch.no_grad():
            return pipeline._evaluate(args, kwargs)

    def _of_copy(self, model: nn.Module, forward: Callable[..., Any]) -> Pipeline:
        if len(self._stages) > 1 or (model.training and torch.is_grad_enabled()):
            raise UsageError(
                "This copy of a pipelined model cannot be called.",
                why="with virtual_stages a copy has the layers of one of this rank's stages"
                if len(self._stages) > 1
                else "it was not prepared: no optimizer would step its weights",
                fix="evaluate a copy in eval() mode and with virtual_stages=1, or load its weights into the prepared "
                "model: model.load_state_dict(copied.state_dict())",
            )
        pipeline = copy.copy(self)
        (stage,) = self._stages.values()
        state = next(m.state for m in model.modules() if isinstance(m, (Skipped, FirstStageLayer)))
        pipeline._model, pipeline._stages = model, {stage.index: replace(stage, forward=forward, state=state)}
        return pipeline

    def _check(self, kwargs: dict[str, Any]) -> None:
        config = getattr(self._model, "config", None)
        for name in _ALL_LAYERS:
            if kwargs.get(name, getattr(config, name, None)):
                raise UsageError(
                    f"{name} is not possible in a pipeline.",
                    why="it collects values from every layer, and each rank has only some of the layers",
                    fix="leave it out; to inspect them, gather the weights with get_state_dict and run one process",
                )
        if kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in _CACHES):
            raise UsageError(
                "A key/value cache, and with it `generate`, is not possible in a pipeline.",
                why="each rank would keep the cache of its own layers, and micro-batches would mix",
                fix="gather the weights with get_state_dict or save_model, and generate in one process",
            )

    # ---- training ----------------------------------------------------------------------------------------------------
    def _train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            calls = split(args, kwargs, self._options.num_microbatches)
        except UsageError as error:  # of this batch; other pipelines may be at work on theirs
            self._end_step(Failure(error, "splitting its batch"))
            raise
        try:
            self.ties.follow()
        except UsageError as error:
            self._end_step(Failure(error, "checking which tied weights train"))
            raise
        weights = self._weights.of(calls)
        scale = self._run.backward_scale()
        wanted = self._record.synchronises

        def synchronise(last: bool) -> None:
            self._record.synchronises = wanted and last

        step = self._step(
            calls,
            self._options.schedule,
            weight=lambda m: weights[m] * scale,
            deferred_wgrad=self._deferred_wgrad,
            synchronise=synchronise,
        )
        self.ties.begin()
        with self._run.driving_backward():
            step.run()
        self._record.synchronises, self.most_in_flight = wanted, step.most_in_flight
        total, kind = self._losses(step, weights)
        total, kind = self._end_step(step.failure, total, kind)
        self.ties.finish()
        loss = _DifferentiatedLoss.apply(
            torch.zeros((), device=total.device, requires_grad=True), total, scale, self._host_reads
        )
        return of_loss(kind, loss)

    def _losses(self, step: Execution, weights: list[torch.Tensor | float]) -> tuple[torch.Tensor, int]:
        """Returns the loss of the batch and the kind of the model's output on the rank of the last stage; zeros
        elsewhere."""
        if step.failure is not None or not step.outputs:
            return torch.zeros((), device=self._run.device), 0
        _, fields = merge_outputs([loss_of(output).detach() for output in step.outputs], weights)
        return fields[0][1].float(), kind_of(step.outputs[0])

    # ---- evaluation --------------------------------------------------------------------------------------------------
    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count = math.gcd(batch_size(args, kwargs), self._options.num_microbatches)
        calls = split(args, kwargs, count)
        step = self._step(calls, "forward")
        step.run()
        kind, fields = 0, None
        if step.outputs and step.failure is None:
            kind, fields = merge_outputs(step.outputs, self._weights.of(calls))
        # Replicas may evaluate different numbers of batches, except on a lazy device.
        group = self._everyone if self._run.backend.is_lazy else self._group
        self._agree(step.failure, group)
        only_loss = not self._options.evaluation_logits and kwargs.get("labels") is not None
        return broadcast_outputs(kind, fields, self._run, self._group, only_loss=only_loss)

    # ---- both --------------------------------------------------------------------------------------------------------
    def _step(self, calls: list[Call], name: str, **options: Any) -> Execution:
        schedule = self._schedule(name, len(calls))
        device = self._run.device.type
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        key: Hashable = (signature(*calls[0]), autocast, self._model.training)
        options["events"] = self._run.events
        return self._make_step(schedule, self._group.index, self._stages, calls, key, **options)

    def _schedule(self, name: str, microbatches: int) -> Schedule:
        if (name, microbatches) not in self._schedules:
            self._schedules[name, microbatches] = make_schedule(
                name, stages=self._group.size, microbatches=microbatches, virtual_stages=self._options.virtual_stages
            )
        return self._schedules[name, microbatches]

    @property
    def _host_reads(self) -> bool:
        return self._run.backend.reads_are_free

    def _end_step(
        self, failure: Failure | None, loss: torch.Tensor | None = None, kind: int = 0
    ) -> tuple[torch.Tensor, int]:
        """Calls :meth:`_agree` for all replicas, which would otherwise wait for a failed one in gradient reduction.
        Collective. With uneven inputs replicas may accumulate different numbers of batches; each then agrees by itself
        on batches that reduce nothing."""
        if self._action.announced:
            if not self._record.synchronises:
                return self._agree(failure, self._group, loss, kind)
            self._action()
        return self._agree(failure, self._everyone, loss, kind)

    def _without_data(self) -> None:
        """Takes part in the end of a step of other ranks, after this rank has run out of data."""
        self._agree(None, self._everyone)

    def _agree(
        self, failure: Failure | None, group: Group, loss: torch.Tensor | None = None, kind: int = 0
    ) -> tuple[torch.Tensor, int]:
        """Sends the loss from the last rank of the pipeline to every rank, and errors of stages to all ranks.
        Collective.

        Args:
            failure: the exception of a stage of this rank.
            group: the ranks that receive it: this pipeline, or all replicas of it.
            loss, kind: the loss and the kind of the output on the last rank of a pipeline; unused on others.

        Raises:
            Exception: the exception of the stage, on every rank.
        """
        loss = torch.zeros((), device=self._run.device) if loss is None else loss
        if not self._host_reads:
            return self._agree_beside_the_device(failure, group, loss, kind)
        rows = loss.new_zeros((self._replicas.size, 3))  # a row for each pipeline
        row = self._replicas.index
        rows[row] = torch.stack([loss, loss.new_tensor(float(kind)), loss.new_tensor(float(failure is not None))])
        rows = self._run.backend.all_reduce(rows, group)
        if rows[:, 2].any():
            self._raise(failure, group)
        return rows[row, 0], int(rows[row, 1])

    def _agree_beside_the_device(
        self, failure: Failure | None, group: Group, loss: torch.Tensor, kind: int
    ) -> tuple[torch.Tensor, int]:
        """:meth:`_agree` for devices on which reading a value is expensive."""
        if not self._run.backend.has_values and self._group.index < self._group.size - 1:
            kind = expected_kind(self._model)  # the last rank, which knows it, does not exist
        everyone = self._run.backend.all_gather_object((failure is not None, kind), group)
        if any(failed for failed, _ in everyone):
            self._raise(failure, group)
        return self._run.backend.all_reduce(loss, self._group), max(kind for _, kind in everyone)

    def _raise(self, failure: Failure | None, group: Group) -> NoReturn:
        own = None
        if failure is not None and not isinstance(failure.error, NeighbourFailed):
            own = Failure(failure.error, f"Rank {self._run.backend.rank} ({failure.place})")
        portable = None if own is None else Failure(_picklable(own.error), own.place)
        everyone = self._run.backend.all_gather_object(portable, group)
        own = own or next(failure for failure in everyone if failure is not None)
        raise own.error from _origin(own)


def _origin(failure: Failure) -> StageFailed:
    """Returns an error that names the failed stage, with the original cause; the failure is raised from it."""
    origin, error = StageFailed(f"{failure.place} raised this; all ranks raise it."), failure.error
    origin.__cause__, origin.__context__ = error.__cause__, error.__context__
    origin.__suppress_context__ = error.__suppress_context__
    return origin


def _picklable(error: Exception) -> Exception:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return UsageError(f"A stage raised {type(error).__name__}: {error}")


def check_loss(loss: torch.Tensor, parameters: set[torch.Tensor]) -> None:
    """Checks that a loss is the one that a pipelined model returned, whose backward passes have already run.

    Args:
        loss: the argument of ``accelerator.backward``.
        parameters: the parameters of the pipelined models. Terms of the loss that depend on other parameters are
            differentiated as usual.

    Raises:
        UsageError: if it is another tensor, or has a term that depends on ``parameters``.
    """
    found, others, new = False, False, [loss.grad_fn]
    seen = set(new)
    while new:
        node = new.pop()
        if node is None:
            continue
        if node.name() == _LOSS_NODE:
            found = True
            continue
        if hasattr(node, "variable"):  # a leaf
            others = True
            if node.variable in parameters:
                raise _replaced("a term that depends on the model's parameters was added to it")
        following = [inner for inner, _ in node.next_functions if inner not in seen]
        seen.update(following)
        new += following
    if not found and not others:
        raise _replaced("another tensor took its place")


def _replaced(how: str) -> UsageError:
    return UsageError(
        f"This is not the loss that the pipelined model returned: {how}.",
        where="accelerator.backward(loss)",
        why="the backward passes of all micro-batches have run inside the model's call, with the loss that it returned",
        fix="compute the loss in the model's forward, on the last stage",
    )


class _DifferentiatedLoss(torch.autograd.Function):
    """A loss whose gradients were already computed. Its backward only checks that the loss was not multiplied by a
    factor."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, scale: float, host_reads: bool) -> torch.Tensor:
        ctx.scale, ctx.host_reads = scale, host_reads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        if ctx.host_reads and not math.isclose(float(gradient), ctx.scale, rel_tol=1e-5):
            raise UsageError(
                f"The loss of a pipelined model was multiplied by {float(gradient) / ctx.scale:g} before `backward`.",
                why="the backward passes of all micro-batches have run inside the model's call, without that factor",
                fix="call accelerator.backward(loss) with the loss that the model returned; scale gradients or the "
                "learning rate instead, and accumulate with gradient_accumulation_steps",
            )
        return None, None, None, None


_LOSS_NODE = f"{_DifferentiatedLoss.__name__}Backward"
"""Autograd's name of the node of such a loss."""
