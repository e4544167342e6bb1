# SPDX-License-Identifier: Apache-2.0
"""Counts an optimizer step of an unchanged training script, by a dry run up to the end of that step.

The accelerator that the script creates gets two more plugins, which observe when backward passes and optimizer steps
begin and end, and which models are prepared. A value that the script reads, such as ``loss.item()``, does not exist in
a dry run: it is zero, and the report lists the lines that read values.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from neuron_accel import DryRun, find_instance
from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import NeuronAccelError, UsageError
from neuron_accel_plan.layout import LayoutCount, accelerate_set_aside, checked_reserve
from neuron_accel_plan.memory import GRADIENTS, HOST, WEIGHTS, StepCounter
from neuron_accel_plan.spaces import Stages, stages_of
from neuron_accel_plan.step import StepCount, flows_of, kept_tensors, no_collection, waiting_gradients
from neuron_accel_plan.trace import Tracer

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.contract import PreparedModel, Run
    from neuron_accel.contract.events import Traffic

INSTANCE_VARIABLE = "NEURON_ACCEL_INSTANCE"
"""Environment variable: the instance type that the plans of runs are checked for."""

_LIBRARIES = {"torch", "accelerate", "neuron_accel", "neuron_accel_plan", "transformers", "tqdm", "contextlib"}
"""Packages that read values for a script, which is named instead of them."""


@dataclass(frozen=True, kw_only=True)
class ScriptCount:
    """What one rank of a training needs in one optimizer step.

    Args:
        layout: the count. ``micro_batch`` is the size of the first dim of the model's first input, and ``sequence``
            that of the second if it has two dims of integers (tokens), else 0.
        step: the optimizer step that was counted, from 1.
        reads: how often values were read that a dry run does not have, by file and line.
    """

    layout: LayoutCount
    step: int
    reads: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain numbers and text: see :meth:`LayoutCount.to_dict`."""
        return {**self.layout.to_dict(), "step": self.step, "values_read": dict(self.reads)}


def count_training(
    train: Callable[[], object],
    *,
    world_size: int,
    rank: int = 0,
    step: int = 2,
    instance: str | None = None,
    reserve: int | None = None,
    lnc: int | None = None,
) -> ScriptCount:
    """Dry-runs a training up to the end of an optimizer step, and counts everything since the end of the previous step;
    for the first step, since the first call of the model.

    All that the training does between the two counts, an evaluation included. It ends by an exception that is none of
    ``Exception``, raised by ``optimizer.step()``; what it has in ``finally`` runs.

    Args:
        train: trains with a ``NeuronAccelerator``, whose backend is replaced by a dry run. Values that it reads from
            tensors on the device are zeros.
        world_size: number of ranks.
        rank: the rank that is counted.
        step: the optimizer step that is counted, from 1; there is no optimizer state before the second.
        instance: instance type, against whose limits and core memory the layout is checked.
        reserve: bytes of a core that are left to what is not counted; by default 10% of its memory.
        lnc: physical cores in a logical one, whose memory is compared; None: the instance's default.

    Raises:
        UsageError: if the training ends before that step, by itself or by an error; the error is the cause.
        NeuronAccelError: the errors of the accelerator.
    """
    if step < 1:
        raise UsageError(f"step is {step}.", why="optimizer steps are counted from 1", fix="pass at least 1")
    core_bytes = None if instance is None else find_instance(instance).core_bytes(lnc)
    recorder = _Recorder(step, instance, core_bytes, checked_reserve(reserve, core_bytes))
    observers = (_First(recorder=recorder), _Last(recorder=recorder))
    with DryRun(world_size=world_size, rank=rank, observers=observers).everywhere(), _planned_for(instance):
        from neuron_accel import NeuronAccelerator  # noqa: F401  chooses what Accelerate uses before that is imported

        with accelerate_set_aside(), recorder:
            try:
                train()
            except _Stopped:
                pass
            except NeuronAccelError:
                if recorder.result is None:
                    raise
            except (SystemExit, Exception) as error:
                if recorder.result is None:
                    raise recorder.not_reached(error) from error
    if recorder.result is None:
        raise recorder.not_reached(None)
    return recorder.result


@contextmanager
def _planned_for(instance: str | None) -> Iterator[None]:
    """A context in which runs are checked against the limits of an instance."""
    if instance is None:
        yield
        return
    before = os.environ.get(INSTANCE_VARIABLE)
    os.environ[INSTANCE_VARIABLE] = find_instance(instance).name
    try:
        yield
    finally:
        if before is None:
            del os.environ[INSTANCE_VARIABLE]
        else:
            os.environ[INSTANCE_VARIABLE] = before


class _Stopped(BaseException):
    """Ends a training. Not an ``Exception``, which a script may catch."""


class _DryCounter(StepCounter):
    """A counter under which values that are read from the device are zeros.

    Attributes:
        reads: how often values were read, by file and line.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            self.reads[_caller()] += 1
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is aten._to_copy.default and args[0].is_meta and _leaves(kwargs.get("device")):
            self.reads[_caller()] += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self.reads[_caller()] += 1
            return args[0].zero_()
        return super().__torch_dispatch__(func, types, args, kwargs)


def _leaves(device: Any) -> bool:
    return device is not None and torch.device(device).type != "meta"


def _caller() -> str:
    """The file and line of the innermost call outside of libraries."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Recorder:
    """Follows a training, and counts one optimizer step of it.

    Args:
        step: the optimizer step, from 1.
        instance: instance type, or None.
        core_bytes: memory of a core, or None.
        reserve: bytes of it that are left to what is not counted.

    Attributes:
        result: the count, once the step has ended.
    """

    def __init__(self, step: int, instance: str | None, core_bytes: int | None, reserve: int) -> None:
        self.counter, self.result = _DryCounter(), None
        self._step, self._instance = step, instance
        self._core_bytes, self._reserve = core_bytes, reserve
        self._run: Run | None = None
        self._phase, self._counting = ExitStack(), ExitStack()
        self._kept: dict[int, list[torch.Tensor]] = {}  # of each prepared model
        self._model, self._parameters, self._stages = "", 0, None
        self._steps: Counter[int] = Counter()  # by optimizer
        self._counted: int | None = None  # the optimizer whose steps are counted
        self._calls, self._input = 0, (0, 0)
        self._traffic: Traffic | None = None
        self._operations = 0

    result: ScriptCount | None
    _stages: Stages | None

    def __enter__(self) -> None:
        self.counter.__enter__()

    def __exit__(self, *args: Any) -> None:
        self._phase.close()
        self._counting.close()
        self.counter.__exit__(*args)

    def enter(self, phase: str) -> None:
        """Begins a phase of the step."""
        self._phase.close()
        self._phase.enter_context(self.counter.during(phase))

    # ---- what the accelerator tells ----------------------------------------------------------------------------------
    def preparing(self, model: PreparedModel, run: Run) -> None:
        """A model is about to be changed by plugins."""
        module = model.module
        self.counter.label([*module.parameters(), *module.buffers()], HOST)
        found = [stages for plugin in run.plan.plugins if (stages := stages_of(plugin, module)) is not None]
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > self._parameters:
            self._model, self._parameters = type(model.original).__name__, size
            self._stages = found[0] if found else None

    def prepared(self, model: PreparedModel, run: Run) -> None:
        """A model is what trains."""
        self._run = self._run or run

        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._called(model, (args, kwargs))

        model.handles.append(model.module.register_forward_pre_hook(called, prepend=True, with_kwargs=True))

    def _called(self, model: PreparedModel, inputs: Any) -> None:
        if self.result is not None:  # the script has caught what stopped it
            raise _Stopped
        self._label(model)
        self.enter("forward")
        if self._step == 1 and self._traffic is None:
            self._begin()
        if torch.is_grad_enabled():
            self._input = _size(inputs)

    def _label(self, model: PreparedModel) -> None:
        if id(model) not in self._kept:
            self._kept[id(model)] = kept = [*kept_tensors(model), *model.module.buffers()]
            self.counter.label(kept, WEIGHTS)
            if len(self._kept) == 1:
                self.counter.name_modules(model.module)

    def backward_begins(self) -> None:
        self._calls += 1
        self.enter("backward")

    def backward_ends(self) -> None:
        from accelerate.state import GradientState

        for model in () if self._run is None else self._run.models:
            self.counter.label(waiting_gradients(model.module), GRADIENTS)
        self.enter("clipping" if GradientState().sync_gradients else "forward")

    def stepped(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        """The end of an optimizer step."""
        stepped = id(optimizer)
        self._steps[stepped] += 1
        self.enter("forward")
        done = self._steps[stepped]
        if self._counted in (None, stepped) and done == self._step:
            self.result = self._end(run)
            raise _Stopped
        if self._counted is None and done == self._step - 1:
            self._counted = stepped
            self._begin()

    # ---- the step that is counted ------------------------------------------------------------------------------------
    def _begin(self) -> None:
        assert self._run is not None
        counter, backend = self.counter, self._run.backend
        for model in self._run.models:
            self._label(model)
        self._counting.enter_context(no_collection())
        self._traffic = self._counting.enter_context(backend.record())
        counter.forget_peaks()
        counter.tracer = Tracer(self._traffic, counter.find, lambda: backend.imitating)
        self._operations, self._calls = counter.operations, 0

    def _end(self, run: Run) -> ScriptCount:
        assert self._traffic is not None
        assert self.counter.tracer is not None
        plan, stages, calls = run.plan, self._stages, max(1, self._calls)
        rows, sequence = self._input
        step = StepCount(
            peaks=tuple(self.counter.peaks()),
            flows=tuple(flows_of(self._traffic.transfers)),
            operations=self.counter.operations - self._operations,
            weights=sum(tensor.nbytes for kept in self._kept.values() for tensor in kept),
            uncounted=tuple(sorted(self.counter.uncounted)),
            noted=tuple(sorted(self.counter.noted)),
            traces=((1.0, self.counter.tracer.trace()),),
        )
        instance = None if self._instance is None else find_instance(self._instance)
        layout = LayoutCount(
            model=self._model,
            parameters=self._parameters,
            mesh=str(plan.mesh),
            plugins=tuple(plugin.spec.name for plugin in plan.plugins if not isinstance(plugin, _Observer)),
            rank=run.backend.rank,
            micro_batch=rows if stages is None else rows // stages.microbatches,
            accumulation=calls if stages is None else calls * stages.microbatches,
            sequence=sequence,
            layers=0 if stages is None else sum(map(sum, stages.blocks)),
            extrapolated=False,
            step=step,
            slowest=step,
            bubble=0.0 if stages is None else stages.bubble,
            instance=None if instance is None else instance.name,
            core_bytes=self._core_bytes,
            reserve=self._reserve,
            axes=tuple((axis.name, axis.degree) for axis in plan.mesh.axes),
            tokens=rows * sequence * calls * run.data_parallel_size,
        )
        return ScriptCount(layout=layout, step=self._step, reads=self.counter.reads)

    def not_reached(self, error: BaseException | None) -> UsageError:
        """Returns the error for a training that ends before the step to count, because of ``error``."""
        steps = max(self._steps.values(), default=0)
        why, fix = "optimizer steps are those of optimizers that the accelerator has prepared", "prepare the optimizer"
        if isinstance(error, Exception):
            why = f"{type(error).__name__}: {error}"
            fix = "run the script as usual to see whether it fails there too"
        elif isinstance(error, SystemExit) and error.code not in (None, 0):
            why, fix = f"it exits with {error.code}", "check its arguments, which follow --"
        elif self._run is None:
            why = "it has prepared no model with a NeuronAccelerator"
            fix = "create a neuron_accel.NeuronAccelerator, and train with what its prepare returns"
        elif steps:
            times = "once" if steps == 1 else f"{steps} times"
            why, fix = f"its optimizer has stepped {times}", f"let it train longer, or count step {steps}"
        if self.counter.reads and isinstance(error, (Exception, SystemExit)):
            why += f"; it got zeros for values that a dry run does not have, at {_shown(self.counter.reads)}"
        return UsageError(f"The training ends before optimizer step {self._step}.", where="dry run", why=why, fix=fix)


def _shown(reads: Mapping[str, int]) -> str:
    return ", ".join(list(reads)[:3])


def _size(inputs: Any) -> tuple[int, int]:
    """Rows of a model's first input, and tokens in each if it has two dims of integers, else 0."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            is_tokens = leaf.dim() == 2 and not leaf.dtype.is_floating_point
            return leaf.shape[0], leaf.shape[1] if is_tokens else 0
    return 0, 0


# ---- the plugins that observe: in a phase, plugins act in the order of their names -----------------------------------
@dataclass(frozen=True, kw_only=True)
class _Observer(StrategyPlugin):
    """Notifies a recorder of events.

    Args:
        recorder: receives it.
    """

    recorder: Any = field(repr=False, metadata={"in_plan": False})


@dataclass(frozen=True, kw_only=True)
class _First(_Observer):
    """Notifies a recorder before other plugins act."""

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="aa_planning", api_version=4, phase=Phase.ADAPTATION, provides=frozenset({"gathered-weights"})
    )

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Notes the model as it is given."""
        self.recorder.preparing(model, run)

    def backward_pass(self, loss: torch.Tensor, run: Run) -> Iterator[None]:
        """Notes the begin of the backward pass."""
        self.recorder.backward_begins()
        yield

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Notes the begin of the optimizer step."""
        self.recorder.enter("optimizer step")
        yield


@dataclass(frozen=True, kw_only=True)
class _Last(_Observer):
    """Notifies a recorder after other plugins have acted."""

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="zz_planning", api_version=4, phase=Phase.OPTIMIZER, provides=frozenset({"gathered-weights"})
    )

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Notes the model that trains."""
        self.recorder.prepared(model, run)

    def backward_pass(self, loss: torch.Tensor, run: Run) -> Iterator[None]:
        """Notes the end of the backward pass."""
        yield
        self.recorder.backward_ends()

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Notes the optimizer step; then counts, or ends the run."""
        yield
        self.recorder.stepped(optimizer, run)
