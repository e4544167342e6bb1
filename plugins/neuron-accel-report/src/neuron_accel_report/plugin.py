# SPDX-License-Identifier: Apache-2.0
"""The plugin of run reports: what its hooks record, and where the figures are written."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
import uuid
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.utils._pytree import tree_leaves

from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.contract.sharded import ShardedOptimizer
from neuron_accel.errors import ConfigurationError, NeuronAccelError
from neuron_accel_report.bundle_command import Redactor
from neuron_accel_report.live import Display, make_display
from neuron_accel_report.recorder import Measured, Recorder, Scalars
from neuron_accel_report.records import (
    Collectives,
    End,
    Header,
    Memory,
    Prediction,
    Range,
    Step,
    Straggler,
    rank_file,
    stragglers_of,
    to_line,
)

if TYPE_CHECKING:
    from neuron_accel.contract import Board, PreparedModel, Run

_MEMORY_EVERY = 10
"""Steps between two counts of the bytes of parameters, gradients and optimizer states, which seldom change."""
_CLOCK_ROUNDS = 9
_GIT_S = 0.5
"""Seconds after which git is not waited for."""
_VALUES = 4
"""Values of a hyperparameter that are named, where parameter groups differ."""
_PATTERN = "rank-*.jsonl"
PLAN = "plan.txt"
"""File with the description of the plan, beside those of the ranks."""


class RunReportWarning(UserWarning):
    """The report of a run cannot be written; the training continues without it."""


@dataclass(frozen=True, kw_only=True)
class RunReportPlugin(StrategyPlugin):
    """Reports what each rank does in each optimizer step: the time of the step and of its parts, collectives with
    their bytes, memory, model FLOPs utilization, compilations, loss, gradient norm and learning rate.

    Every rank writes a file of JSON lines, see :mod:`neuron_accel_report.records`. ``neuron-accel report`` makes a
    page of them and ``neuron-accel trace`` a trace. The first rank logs the figures to the trackers of the training
    (``log_with`` of the accelerator), under names that begin with ``run_report/``, and shows them while it trains.

    Times are those of the host: on a device that computes beside the host, a part is as long as the host takes to
    launch its kernels and waits for them, and on a lazy device the time of the device is in the part ``device``. Loss
    and gradient norm are read when they are there, without a further execution, so on accelerators the line of a step
    is written at the end of the next one. If a file cannot be written, one warning is issued and the report ends; the
    training continues.

    The last line says that the run has ended in order: after ``end_training`` or ``free_memory``, or when the
    interpreter exits without an exception.

    Args:
        folder: the folder of the report, on each machine. Files of an earlier run in it are moved to a folder
            ``earlier-...`` in it.
        trace_steps: numbers of the optimizer steps, from 0, whose ranges are written for ``neuron-accel trace``.
        predicted: a file that ``neuron-accel plan SCRIPT --json`` has written; the report then has the predicted
            collectives beside those that were seen, and operations for the utilization. It is used on the rank that was
            planned.
        show: what the first rank prints: ``"dashboard"``, a few lines that are redrawn (needs ``rich``); ``"lines"``,
            one line every ``show_seconds``; ``"nothing"``; ``"auto"``, a dashboard if standard output is a terminal and
            rich is installed, else lines.
        show_seconds: seconds between two lines.
        compare_every: number of steps after which the first rank compares the times of all ranks, to name stragglers
            while the training runs; 0 for never. Ranks exchange short notes, without a collective.
        track: whether figures are logged to trackers.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="run_report", api_version=4, phase=Phase.OPTIMIZER, provides=frozenset({"weights-in-passes"})
    )

    folder: Path = Path("run_report")
    trace_steps: tuple[int, ...] = ()
    predicted: Path | None = None
    show: Literal["auto", "dashboard", "lines", "nothing"] = "auto"
    show_seconds: float = 30.0
    compare_every: int = 50
    track: bool = True

    def __post_init__(self) -> None:
        for name in ("folder", "predicted"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, Path(value))
        if self.compare_every < 0:
            raise ConfigurationError(f"compare_every is {self.compare_every}; expected a number of steps, or 0.")
        if self.show_seconds < 0:
            raise ConfigurationError(f"show_seconds is {self.show_seconds}; expected a number of seconds.")

    # ---- life of a run -----------------------------------------------------------------------------------------------
    def setup(self, run: Run) -> None:
        """Begins the report. Collective."""
        if not run.backend.has_values or run.is_precompiling:
            self._observe_only(run)
            return
        run.state(self)["report"] = report = Report(self, run)
        run.undo(report.close)

    def _observe_only(self, run: Run) -> None:
        """A run that only collects graphs has the same outputs, and no report."""
        run.state(self)["scalars"] = Scalars(run.backend)

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Counts the samples and tokens of the first model's batches. Collective if the run continues after its objects
        were released, which ended the report: another one begins."""
        if not run.state(self):
            self.setup(run)
            model.make_events(run.events)
        report = self._report(run)
        if report is not None and model is run.models[0]:
            model.handles.append(
                model.module.register_forward_pre_hook(
                    torch.compiler.disable(report.called), prepend=True, with_kwargs=True
                )
            )

    def backward_pass(self, loss: torch.Tensor, run: Run) -> Iterator[None]:
        """Keeps the loss."""
        if isinstance(loss, torch.Tensor):
            self._keep(run, "loss", loss)
        yield

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Keeps the gradient norm and learning rates, and counts memory every few steps."""
        if isinstance(run.norm, torch.Tensor):
            self._keep(run, "norm", run.norm)
        yield
        report = self._report(run)
        if report is not None:
            report.stepped(optimizer, run)

    def save(self, run: Run) -> dict[str, Any]:
        """Saves the number of steps."""
        report = self._report(run)
        return {} if report is None else {"steps": report.recorder.step}

    def load(self, state: dict[str, Any], run: Run) -> None:
        """Continues counting steps."""
        report = self._report(run)
        if report is not None and "steps" in state:
            report.recorder.step = int(state["steps"])

    def _report(self, run: Run) -> Report | None:
        return run.state(self).get("report")

    def _keep(self, run: Run, name: str, value: torch.Tensor) -> None:
        state = run.state(self)
        report: Report | None = state.get("report")
        if report is not None:
            report.keep(name, value)
        elif "scalars" in state and run.backend.has_values:  # an output of the graph, until the next step
            state[name] = state["scalars"].keep(value)


class Report:
    """The report of one rank.

    Args:
        options: the plugin.
        run: the run.
    """

    def __init__(self, options: RunReportPlugin, run: Run) -> None:
        backend = run.backend
        # An exit handler keeps this object, which must not keep models.
        self._options, self._run, self._backend, self._hardware = options, weakref.ref(run), backend, run.hardware
        self._prediction, self._operations = _read_prediction(options.predicted, backend.rank)
        earlier = f"earlier-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        self._file = ReportFile(options.folder, backend.rank)
        self._commit = ""
        if backend.rank == 0:
            self._file.move_earlier(earlier)
            script = getattr(sys.modules.get("__main__"), "__file__", None)
            self._commit = "" if script is None else commit_of(Path(script).resolve().parent)
        self._name, earlier, self._started = backend.broadcast_object(
            (uuid.uuid4().hex[:12], earlier, time.time_ns()), run.world
        )
        self._file.move_earlier(earlier, self._name)
        self._clock, self._clock_error = clock_offset(run)
        since = time.time_ns() + round(self._clock * 1e9) - self._started
        self._origin = time.perf_counter_ns() - since  # when the run began, by this process
        self._board: Board | None = backend.board() if options.compare_every and run.world.size > 1 else None
        self._display: Display | None = None
        if backend.rank == 0:
            self._display = make_display(options.show, options.show_seconds)
        self._scalars = Scalars(backend)
        self._waiting_for_values: Measured | None = None
        self._compared: int | None = None  # a step whose times the ranks have exchanged
        self._late: list[Straggler] = []
        self._replicas = run.data_parallel_size
        self._sharers = run.world.size // self._replicas  # ranks that share the samples
        self._parameters: int | None = None
        self._flops_per_token = 0
        self._has_header, self._closed, self._last = False, False, 0
        self._steps = 0
        with ExitStack() as stack:
            self.recorder = Recorder(
                backend, origin=self._origin, traced=frozenset(options.trace_steps), finished=self._finished
            )
            stack.callback(self.recorder.close)
            stack.callback(run.events.observe(self.recorder))
            self._observing = stack.pop_all()
        self._process, self._error = os.getpid(), _last_error()
        atexit.register(self._left)
        self._freed = weakref.finalize(run, self._left)
        self._freed.atexit = False  # exit handlers of devices run before those of weakref

    # ---- what hooks tell ---------------------------------------------------------------------------------------------
    def keep(self, name: str, value: torch.Tensor) -> None:
        began, seen = time.perf_counter(), self.recorder.observed
        if name == "loss":
            seen.losses.append(self._scalars.keep(value))
        else:
            seen.norm = self._scalars.keep(value)
        self._spent(began)

    def called(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The first model is called: the first tensor of its inputs has a row for each sample, and is one of tokens if
        it has two dims of integers."""
        if not (torch.is_grad_enabled() and module.training):
            return
        began, seen = time.perf_counter(), self.recorder.observed
        first = _first_tensor(args, kwargs)
        if first is not None and first.dim():
            seen.samples = (seen.samples or 0) + first.shape[0]
            if first.dim() == 2 and not first.is_floating_point():
                seen.tokens = (seen.tokens or 0) + first.numel()
        self._spent(began)

    def stepped(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        began, seen = time.perf_counter(), self.recorder.observed
        seen.stepped = True
        rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
        seen.lr = tuple(float(lr) for lr in rates if not isinstance(lr, torch.Tensor) or lr.device.type == "cpu")
        if self.recorder.step < 2 or not self.recorder.step % _MEMORY_EVERY:
            self.recorder.memory = _memory_of(run, optimizer)
        self._spent(began)

    def _spent(self, began: float) -> None:
        self.recorder.own += time.perf_counter() - began

    # ---- steps -------------------------------------------------------------------------------------------------------
    def _finished(self, measured: Measured) -> None:
        """Is called at the end of a step. Reads its values now where that is free, else at the end of the next step."""
        if self._parameters is None:
            self._count_parameters()
        if self._scalars.at_once:
            self._emit(measured)
            return
        measured.ready = self._scalars.event()
        before, self._waiting_for_values = self._waiting_for_values, measured
        if before is not None:
            self._emit(before)

    def _count_parameters(self) -> None:
        """Counts parameters, and the operations for a token: a matrix takes 2 for each of its elements in the forward
        pass and 2 for its input's gradient, and 2 more if it trains."""
        elements, run = 0, self._run()
        for model in [] if run is None else run.models[:1]:
            for record in model.parameters:
                size = torch.Size(record.layout.shape).numel()
                elements += size
                if len(record.layout.shape) > 1:
                    trains = record.current is None or record.current.requires_grad
                    self._flops_per_token += size * (6 if trains else 4)
        self._parameters = elements

    def _emit(self, measured: Measured) -> None:
        if measured.ready is not None:
            measured.ready.synchronize()
        scalars = Scalars.mean
        values = {
            "loss": scalars(measured.losses),
            "grad_norm": None if measured.norm is None else scalars([measured.norm]),
            "flops": (flops := self._flops(measured.step)),
            "mfu": self._utilization(flops, measured.step),
        }
        step, run = Step(**{**vars(measured.step), **values}), self._run()
        if not self._has_header:
            if run is None:  # freed after its first step, before its values were read
                return
            self._has_header = True
            self._file.write([self._header(run, step)])
            if self._backend.rank == 0:
                self._file.write_plan(run.plan.explain())
        self._file.write([step, *measured.ranges])
        self._steps += 1
        self._compare(step)
        if self._options.track and run is not None and run.has_trackers():
            run.log(figures(step), step.step)
        if self._display is not None:
            try:
                self._display.show(step, self._late, self._replicas)
            except (OSError, ValueError):  # standard output is closed
                self._display = None

    def _flops(self, step: Step) -> float | None:
        if self._operations is not None:
            return float(self._operations)
        if step.tokens is None:
            return None
        return step.tokens * self._flops_per_token / self._sharers

    def _utilization(self, flops: float | None, step: Step) -> float | None:
        peak = None if self._hardware is None else self._hardware.peak_flops
        if peak is None or flops is None or step.training_seconds <= 0:
            return None
        return flops / step.training_seconds / peak

    def _header(self, run: Run, step: Step) -> Header:
        hardware, backend = self._hardware, self._backend
        optimizer = next((each for each in run.optimizers if id(each) == self.recorder.optimizer), None)
        return Header(
            run=self._name,
            rank=backend.rank,
            world_size=backend.world_size,
            mesh={axis.name: axis.degree for axis in run.mesh.axes},
            coordinates=run.coordinates,
            plugins=tuple(plugin.spec.name for plugin in run.plan.plugins),
            host=platform.node(),
            device=backend.device.type,
            backend=backend.name,
            instance=None if hardware is None else hardware.name,
            peak_flops=None if hardware is None else hardware.peak_flops,
            parameters=self._parameters,
            torch=torch.__version__,
            neuron_accel=_version("neuron-accel"),
            clock_offset=self._clock,
            clock_error=self._clock_error,
            started=self._started / 1e9,
            predicted=self._prediction,
            micro_batches=step.micro_batches,
            mixed_precision="" if optimizer is None else getattr(optimizer.accelerator_state, "mixed_precision", ""),
            gradient_accumulation_steps=None if optimizer is None else optimizer.gradient_state.num_steps,
            global_batch=None if step.samples is None else step.samples * self._replicas,
            seed=torch.initial_seed(),
            optimizer="" if optimizer is None else type(optimizer.given).__name__,
            hyperparameters={} if optimizer is None else hyperparameters(optimizer.given),
            model=type(run.models[0].inner).__name__ if run.models else "",
            command=Redactor(os.environ)(shlex.join(sys.argv)),
            options={plugin.spec.name: found for plugin in run.plan.plugins if (found := _options(plugin))},
            versions={"python": platform.python_version()}
            | {name: _version(name) for name in ("accelerate", "transformers") if name in sys.modules},
            commit=self._commit,
        )

    def _compare(self, step: Step) -> None:
        """Exchanges the times of a step with other ranks: each writes a note to the board, which the first one reads a
        step later. A missing note is ignored."""
        if self._board is not None:
            try:
                self._exchange(step, self._board)
            except NeuronAccelError:  # the rank that keeps the board has ended
                self._board = None

    def _exchange(self, step: Step, board: Board) -> None:
        if self._compared is not None and self._backend.rank == 0:
            ranks = {}
            for rank in range(self._backend.world_size):
                left = board.get(self._key(self._compared, rank))
                found = None if left is None else json.loads(left)
                if found is not None and found["step"] == self._compared:
                    ranks[rank] = Step(step=found["step"], begin=0, end=found["nanoseconds"], parts=found["parts"])
            self._late = stragglers_of(self._compared, ranks)
        self._compared = None
        if (step.step + 1) % self._options.compare_every == 0:
            note = {"step": step.step, "nanoseconds": step.end - step.begin, "parts": dict(step.parts)}
            board.put(self._key(step.step, self._backend.rank), json.dumps(note).encode())
            self._compared = step.step

    def _key(self, step: int, rank: int) -> str:
        """Key of a rank's note. It differs from that of the previous note, which may not have been read yet."""
        return f"run_report/{self._name}/{rank}/{step // self._options.compare_every % 2}"

    def _left(self) -> None:
        """Ends the report of a run that nothing has ended, when it is freed or the interpreter exits. If an exception
        was not caught, the run has not ended in order."""
        if os.getpid() == self._process and _last_error() == self._error:
            self._board = None  # other ranks may be gone
            with contextlib.suppress(Exception):  # what can be read now is
                self.close()

    def close(self) -> None:
        """Writes the rest, and ends the report."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._left)
        self._freed.detach()
        last, self._waiting_for_values = self._waiting_for_values, None
        if last is not None:
            self._emit(last)
        self._observing.close()
        if self._has_header:
            now = time.perf_counter_ns() - self._origin
            self._file.write([*self.recorder.rest(), End(time=now, steps=self._steps)])
        self._file.close()
        if self._display is not None:
            with contextlib.suppress(OSError, ValueError):
                self._display.close()


# ---- files -----------------------------------------------------------------------------------------------------------
class ReportFile:
    """The file of a rank. If it cannot be written, one warning is issued, and nothing more is written.

    Args:
        folder: the folder of the report.
        rank: the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._path = folder, folder / rank_file(rank)
        self._file: FileIO | None = None
        self._failed = False

    def move_earlier(self, name: str, run: str | None = None) -> None:
        """Moves the files of an earlier run to another folder.

        Args:
            name: of that folder.
            run: the run that files of this folder may belong to; they stay.
        """
        try:
            for path in sorted((*self._folder.glob(_PATTERN), *self._folder.glob(PLAN))):
                if run is not None and (path != self._path or _run_of(path) == run):
                    continue
                target = self._folder / name
                target.mkdir(exist_ok=True)
                path.rename(target / path.name)
        except FileNotFoundError:  # another rank of this machine has moved it
            return
        except OSError as error:
            self._give_up(error)

    def write(self, records: Iterable[Header | Step | Range | End]) -> None:
        """Appends lines, all of them in one write."""
        if self._failed:
            return
        try:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115  it stays open
            self._file.write("".join([f"{to_line(record)}\n" for record in records]).encode())
        except (OSError, ValueError) as error:
            self._give_up(error)

    def write_plan(self, text: str) -> None:
        """Writes the plan of the run beside the files of the ranks."""
        if self._failed:
            return
        try:
            (self._folder / PLAN).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        self.close()
        warnings.warn(
            f"The report of this run ends here: {self._path} cannot be written ({error}). The training continues.",
            RunReportWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:  # what could not be flushed is lost; a warning was issued, or this is the end
                self._failed = True


def _run_of(path: Path) -> str | None:
    """Name of the run that has written a file."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.loads(file.readline()).get("run")
    except (OSError, ValueError, AttributeError):
        return None


def _read_prediction(path: Path | None, rank: int) -> tuple[Prediction | None, int | None]:
    """Returns what a dry run has counted for this rank: its collectives and its operations in a step.

    Raises:
        ConfigurationError: if the file is not one that ``neuron-accel plan SCRIPT --json`` writes.
    """
    if path is None:
        return None, None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["rank"] != rank:
            return None, None
        flows: dict[tuple[str, str], Collectives] = {}
        for flow in found["traffic"]:
            key = (flow["op"], flow["axis"])
            before = flows.get(key, Collectives(op=key[0], group=key[1], count=0, bytes=0))
            flows[key] = dataclasses.replace(
                before, count=before.count + int(flow["messages"]), bytes=before.bytes + int(flow["sent"])
            )
        return Prediction(traffic=tuple(flows.values())), int(found["operations"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{str(path)!r} has no prediction.",
            where="plugin 'run_report', predicted",
            why=f"{type(error).__name__}: {error}",
            fix="write it with `neuron-accel plan SCRIPT --json > FILE`",
        ) from error


# ---- figures ---------------------------------------------------------------------------------------------------------
def figures(step: Step) -> dict[str, float]:
    """Returns the figures of a step for trackers, those that are known."""
    training = max(step.training_seconds, 1e-9)
    found: dict[str, float | None] = {
        "run_report/seconds": step.seconds,
        "run_report/tokens_per_second": None if step.tokens is None else step.tokens / training,
        "run_report/samples_per_second": None if step.samples is None else step.samples / training,
        "run_report/waiting": step.waiting,
        "run_report/mfu": step.mfu,
        "run_report/compilations": step.compilations,
        "run_report/loss": step.loss,
        "run_report/grad_norm": step.grad_norm,
        "run_report/lr": step.lr[0] if step.lr else None,
    }
    for part, seconds in step.parts.items():
        found["run_report/parts/" + part] = seconds
    for name, value in vars(step.memory).items():
        found["run_report/memory/" + name] = value
    for each in step.collectives:
        name = "run_report/sent/" + each.group
        found[name] = (found.get(name) or 0) + each.bytes
    return {name: float(value) for name, value in found.items() if value is not None}


def _first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The first tensor of a model's inputs, also inside tuples, lists and dicts."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            return each
        if each is not None:
            break
    return next((leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)), None)


def _memory_of(run: Run, optimizer: torch.optim.Optimizer) -> Memory:
    """Bytes of the parameters, gradients and optimizer state on this rank."""
    parameters = 0
    gradients: dict[int, int] = {}
    tensors: dict[int, int] = {}
    owners: dict[int, Any] = {}
    for model in run.models:
        for record in model.parameters:
            current, weights = record.current, record.weights
            if current is not None:
                owners[id(current)] = current
            if weights is not None:
                parameters += (weights.stop - weights.start) * (0 if current is None else current.element_size())
            elif current is not None:
                parameters += current.nbytes
    state = optimizer.shard_state if isinstance(optimizer, ShardedOptimizer) else optimizer.state
    for key, entries in state.items():
        if isinstance(key, torch.Tensor):
            owners[id(key)] = key
        if isinstance(entries, Mapping):
            for value in entries.values():
                if isinstance(value, torch.Tensor):
                    tensors[id(value)] = value.nbytes
    for owner in owners.values():
        gradient = owner.grad
        if type(gradient) is torch.Tensor:  # another type stands for a gradient that is sharded
            gradients[id(gradient)] = gradient.nbytes
    return Memory(parameters=parameters, gradients=sum(gradients.values()), optimizer=sum(tensors.values()))


def clock_offset(run: Run) -> tuple[float, float]:
    """Returns the seconds to add to this machine's clock to have that of the first rank, and the largest error of
    them. Collective.

    Ranks of one machine share a clock. For the other machines, in each round the first rank reads its clock after every
    rank has entered a barrier and before any rank receives the reading. So this rank can bound the offset by its own
    clock, read before the barrier and after the exchange. The bounds of all rounds hold at the same time; the offset is
    the middle between the closest two, the error half of their distance.
    """
    backend = run.backend
    if run.world.size == 1:
        return 0.0, 0.0
    hosts = backend.all_gather_object(platform.node(), run.world)
    if len(set(hosts)) == 1:
        return 0.0, 0.0
    least, most = -math.inf, math.inf
    for _ in range(_CLOCK_ROUNDS):
        began = time.time()
        backend.barrier()
        first = backend.all_gather_object(time.time(), run.world)[0]
        least, most = max(least, first - time.time()), min(most, first - began)
    if hosts[0] == platform.node():
        return 0.0, 0.0
    return (least + most) / 2, abs(most - least) / 2


def _last_error() -> int:
    """The ``id`` of the last exception that no code has caught, which is not kept."""
    return id(getattr(sys, "last_value", None))


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Returns the hyperparameters of an optimizer by name, as text: those of its groups, with the learning rates that
    schedulers begin with, and several values where groups differ. None that is off."""
    found = {}
    for name in sorted(optimizer.defaults):
        values = [group.get(f"initial_{name}", group.get(name)) for group in optimizer.param_groups]
        read = [
            float(each) if isinstance(each, torch.Tensor) and each.device.type == "cpu" else each for each in values
        ]
        texts = dict.fromkeys(str(each) for each in read if each is not None and not isinstance(each, torch.Tensor))
        if texts and set(texts) != {"False"}:
            found[name] = " / ".join([*texts][:_VALUES]) + (" / ..." if len(texts) > _VALUES else "")
    return found


def commit_of(folder: Path, seconds: float = _GIT_S) -> str:
    """Returns the commit of the git repository that a folder is in; empty if there is none, or git does not answer.

    Args:
        folder: the folder.
        seconds: after which git is not waited for.
    """
    command = ("git", "-C", str(folder), "rev-parse", "--verify", "HEAD")
    try:
        found = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def _options(plugin: StrategyPlugin) -> dict[str, Any]:
    """The options of a plugin that are not its defaults, as JSON has them."""
    found = {}
    for each in dataclasses.fields(plugin) if dataclasses.is_dataclass(plugin) else ():
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        value = getattr(plugin, each.name, default)
        if each.init and value != default:
            found[each.name] = value if isinstance(value, (bool, int, str)) else str(value)
    return found


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""
