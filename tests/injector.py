"""Kills, stops, slows or starves a process at a named point of a run: the part of tests/faults.py that is in the
process itself.

A script begins with :data:`PREAMBLE`, calls ``faults.reach("rendezvous")`` before and after it makes its accelerator,
and then ``faults.watch(accelerator)``. The points are events of the run (passes, collectives, steps), operations on
files, and files that Python opens and removes.

The folder that :data:`VARIABLE` names has the plan, a list of faults that are injected one after another; a file for
each that has been injected; and the journal, a JSON object a line, of what has happened. What a process has written
into it before it is killed is kept by the kernel. Without the variable nothing happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

VARIABLE = "NEURON_ACCEL_CHAOS"
PLAN, JOURNAL, DONE = "plan.json", "journal.jsonl", "done_{}"
KILL, STOP, SLOW, MEMORY, DESCRIPTORS, CPU = ACTIONS = ("kill", "stop", "slow", "memory", "descriptors", "cpu")
PREAMBLE = f"""\
import sys

sys.path.append({str(Path(__file__).parents[1])!r})
from tests.injector import FaultInjector

faults = FaultInjector.of_environment()
"""
"""The first lines of a script."""
SLOW_SECONDS = 0.05
"""How long a slowed process sleeps at each point."""
MEMORY_LEFT = 16 << 20
"""Bytes that a process starved of memory can still map."""

POINTS = {
    "start": "a rank begins, before it imports anything",
    "rendezvous": "ranks connect: before (1) and after (2) they meet",
    "forward": "a module is about to compute, each module of a model counted",
    "backward": "a backward pass begins, or reaches the output of a module",
    "collective": "a collective is about to be sent",
    "step": "an optimizer is about to step",
    "worker": "a worker process of a data loader begins, or is about to load a batch",
    "load": "a checkpoint is loaded: its manifest, and then another file, is about to be opened; all has been read",
    "save.mkdir": "a save is about to make a folder",
    "save.lock": "a save is about to lock the folder",
    "save.open": "a save is about to create a file",
    "save.write": "a save is about to write at most 1 MiB into a file",
    "save.fsync": "a save is about to make a file or a folder durable",
    "save.rename": "a save is about to replace a file",
    "save.remove": "a save is about to remove a file of an older checkpoint, or the checkpoint",
    "consolidate.mkdir": "consolidate is about to make a folder",
    "consolidate.lock": "consolidate is about to lock the folder",
    "consolidate.open": "consolidate is about to create a file",
    "consolidate.write": "consolidate is about to write a block of a file",
    "consolidate.fsync": "consolidate is about to make a file or a folder durable",
    "consolidate.rename": "consolidate is about to replace a file",
    "consolidate.remove": "consolidate is about to remove what an earlier run has left",
}
"""Every point and when a process reaches it."""
_CHECKPOINT = re.compile(r"(.*/checkpoint_\d+)/")
_LOCK = ".saving.json"


class FaultInjector:
    """Injects faults into this process where the plan says, and keeps the journal.

    Args:
        folder: see this module.
    """

    def __init__(self, folder: str) -> None:
        self._folder, self._loading, self._opened = folder, False, dict[bool, str]()
        with open(os.path.join(folder, PLAN)) as file:
            plan = json.load(file)
        self._faults: list[dict[str, Any]] = plan["faults"]
        self._counts_points: bool = plan["counts"]
        self._rank, self._size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._journal = os.open(os.path.join(folder, JOURNAL), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        self._start = f"{os.getpid()}" if again is None else f"{os.getppid()}.{again}"  # the same on all ranks
        self._next, self._seen = 0, 0
        self._slow_until, self._is_worker = 0.0, False
        self._steps: Counter[int] = Counter()
        if self._counts_points or any(fault["point"] == "worker" for fault in self._faults):
            os.register_at_fork(after_in_child=self._forked)
        self.write("start")

    @classmethod
    def of_environment(cls) -> FaultInjector:
        """Returns the injector of this rank, which has begun."""
        injector = cls(folder) if (folder := os.environ.get(VARIABLE)) else NoFaults()
        injector.reach("start")
        return injector

    def write(self, event: str, **more: object) -> None:
        """Appends a line to the journal."""
        who = {"start": self._start, "pid": os.getpid(), "rank": self._rank}
        line = {"event": event, "time": time.time(), **who, **more}
        with contextlib.suppress(OSError):
            os.write(self._journal, f"{json.dumps(line)}\n".encode())

    # ---- what is watched ---------------------------------------------------------------------------------------------
    def watch(self, accelerator: Any) -> None:
        """Injects faults into what an accelerator does, from now until this process ends."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        accelerator.run.events.observe(_observer(self))
        self.watch_files("save")
        sys.addaudithook(self._audit)  # it cannot be removed
        register_module_forward_pre_hook(lambda module, inputs: self.reach("forward"))
        register_module_forward_hook(lambda module, inputs, output: self._watch_backward(output))

    def watch_files(self, work: str) -> None:
        """Makes each operation on files a point, ``work.NAME``."""
        from neuron_accel.checkpoint.format.files import Files

        def operation(files: Files, name: str, path: Any) -> None:
            if name == "lock" and not self._rank:
                self.write("saving", checkpoint=str(path.parent))
            self.reach(f"{work}.{name}")

        Files.operation = operation  # type: ignore[method-assign]

    def _watch_backward(self, output: Any) -> None:
        if getattr(output, "requires_grad", False) and not hasattr(output, "full_tensor"):  # logits that are sharded
            output.register_hook(lambda gradient: self.reach("backward"))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Follows the files that Python opens and removes (https://docs.python.org/3/library/audit_events.html)."""
        if event == "open" and self._loading and (found := _CHECKPOINT.match(str(arguments[0]))):
            is_manifest = str(arguments[0]).endswith("/manifest.json")
            is_first = is_manifest not in self._opened
            self._opened[is_manifest] = found[1]
            if is_first:
                self.reach("load")
        elif event == "os.remove" and not self._rank:
            folder, name = os.path.split(os.fspath(arguments[0]))
            if name == _LOCK and os.path.exists(os.path.join(folder, "manifest.json")):
                self.write("saved", checkpoint=folder)

    def begin(self, event: Any) -> None:
        """Is called when an event of the run begins."""
        if event.category in ("collective", "deferred"):
            self.reach("collective")
        elif event.category == "step" or event.name == "backward":
            self.reach("step" if event.category == "step" else "backward")
        elif event.name == "load_state":
            self._loading, self._opened = True, {}

    def end(self, event: Any) -> None:
        """Is called when an event of the run ends."""
        if event.name == "load_state":
            self._loading = False
        if sys.exc_info()[0] is not None:  # with an error
            return
        if event.name == "load_state" and False in self._opened:
            self.reach("load")
            self._record("loaded", checkpoint=self._opened[False])
        elif event.category == "step":
            before = max(self._steps.values(), default=0)
            self._steps[event.arguments["optimizer"]] += 1
            if max(self._steps.values()) > before:  # of several optimizers one is counted
                self._record("stepped")

    def _record(self, name: str, **more: object) -> None:
        if self._rank == 0 and not self._is_worker:
            self.write(name, **more)

    def reach(self, point: str) -> None:
        """Is called when this process reaches a point."""
        if self._counts_points:
            self.write("point", point=point)
        if time.monotonic() < self._slow_until:
            time.sleep(SLOW_SECONDS)
        while self._next < len(self._faults) and (started := self._injected_in(self._next)) is not None:
            if self._faults[self._next]["action"] == KILL and started == self._start:
                return  # a rank of this start was killed, and the next fault is for the next start
            self._next, self._seen = self._next + 1, 0
        if self._next == len(self._faults):
            return
        fault = self._faults[self._next]
        if not (point == fault["point"] or point.startswith(f"{fault['point']}.")):
            return
        if fault["rank"] is not None and fault["rank"] % self._size != self._rank:
            return
        self._seen += 1
        if self._seen != fault["count"]:
            return
        done = os.path.join(self._folder, DONE.format(self._next))
        with open(own := f"{done}.{os.getpid()}.{threading.get_ident()}", "w") as file:
            file.write(self._start)
        try:
            os.link(own, done)
        except FileExistsError:  # another rank was first
            return
        finally:
            os.unlink(own)
        self.write("fault", number=self._next, point=point)
        self._inject(fault)

    def _injected_in(self, number: int) -> str | None:
        """The start in which a fault was injected; None if it has not been."""
        try:
            with open(os.path.join(self._folder, DONE.format(number))) as file:
                return file.read()
        except FileNotFoundError:
            return None

    # ---- workers of a data loader ------------------------------------------------------------------------------------
    def _forked(self) -> None:
        """Is called in each process that this one forks: in a worker of a data loader it watches the batches."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_globals.get("__name__") != "torch.utils.data.dataloader":
            frame = frame.f_back
        if frame is None or self._is_worker:
            return
        self._is_worker, self._seen = True, 0
        sys.setprofile(self._profile)
        self.reach("worker")

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        fetches = event == "call" and frame.f_code.co_name == "fetch"
        if fetches and frame.f_globals.get("__name__") == "torch.utils.data._utils.fetch":
            self.reach("worker")

    # ---- what is done to this process --------------------------------------------------------------------------------
    def _inject(self, fault: dict[str, Any]) -> None:
        action = fault["action"]
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # it is delivered to one of the threads; this one must not go on
        elif action == STOP:  # the command continues it
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == SLOW:
            self._slow_until = time.monotonic() + fault["seconds"]
        elif action == MEMORY:
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            _limit(resource.RLIMIT_AS, used + MEMORY_LEFT)
        elif action == DESCRIPTORS:
            _limit(resource.RLIMIT_NOFILE, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        elif action == CPU:
            core = min(os.sched_getaffinity(0))
            for thread in map(int, os.listdir("/proc/self/task")):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(thread, {core})
                    os.setpriority(os.PRIO_PROCESS, thread, 19)


class NoFaults(FaultInjector):
    """The injector of a process into which nothing is injected."""

    def __init__(self) -> None: ...

    def reach(self, point: str) -> None: ...

    def watch(self, accelerator: Any) -> None: ...


def _observer(injector: FaultInjector) -> Any:
    """Returns the observer of a run's events; :mod:`neuron_accel` must not be imported before the script does."""
    from neuron_accel.contract.events import Observer

    class Points(Observer):
        categories = frozenset({"collective", "deferred", "step", "part", "call"})
        begin, end = staticmethod(injector.begin), staticmethod(injector.end)

    return Points()


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
