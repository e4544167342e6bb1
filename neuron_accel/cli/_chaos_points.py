# SPDX-License-Identifier: Apache-2.0
"""Kills, stops, slows or starves a process at a named point of a run: the part of ``neuron-accel chaos`` that is in the
process itself.

The package raises audit events (PEP 578) ``neuron_accel.POINT`` where a fault may be injected, such as
``neuron_accel.save.fsync``; without an audit hook such a call takes some 35 ns. If ``neuron-accel chaos`` has started
the process, which :data:`VARIABLE` says, an audit hook receives them, so that no script has to be changed.

The folder that :data:`VARIABLE` names has the plan, a list of faults that are injected one after another; a file for
each that has been injected; and the journal, a JSON object a line, of what has happened. What a process has written
into it before it is killed is kept by the kernel.

This module imports the standard library only, and is also loaded from its file, see ``_rank.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Any

VARIABLE = "NEURON_ACCEL_CHAOS"
PLAN, JOURNAL, DONE = "plan.json", "journal.jsonl", "done_{}"
KILL, STOP, SLOW, MEMORY, DESCRIPTORS, CPU = ACTIONS = ("kill", "stop", "slow", "memory", "descriptors", "cpu")
PREFIX = "neuron_accel."
SLOW_SECONDS = 0.05
"""How long a slowed process sleeps at each point."""
MEMORY_LEFT = 16 << 20
"""Bytes that a process starved of memory can still map."""

POINTS = {
    "start": "a rank begins, before it runs the script",
    "rendezvous": "ranks connect: before (1) and after (2) they meet",
    "forward": "a module is about to compute, each module of a model counted",
    "backward": "a backward pass begins, or a gradient of a parameter is complete",
    "collective": "a collective on tensors is about to be issued",
    "step": "an optimizer is about to step",
    "worker": "a worker process of a data loader begins, or is about to load a batch",
    "load": "a checkpoint is loaded: begins, has been checked, is done",
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
    "reshard.mkdir": "reshard is about to make a folder",
    "reshard.lock": "reshard is about to lock the folder",
    "reshard.open": "reshard is about to create a file",
    "reshard.write": "reshard is about to write a block of a file",
    "reshard.fsync": "reshard is about to make a file or a folder durable",
    "reshard.rename": "reshard is about to replace a file, at last the manifest",
    "reshard.remove": "reshard is about to remove what an earlier run has left",
}
"""Every point and when a process reaches it."""
RECORDED = ("run", "stepped", "saving", "saved", "loaded")
"""Further events, which are written into the journal only."""


def install(folder: str) -> FaultInjector:
    """Injects the faults of the plan in ``folder`` into this process, from now until it ends: an audit hook cannot be
    removed."""
    injector = FaultInjector(folder)
    sys.addaudithook(injector.audit)
    return injector


class FaultInjector:
    """Injects faults into this process where the plan says, and keeps the journal.

    Args:
        folder: see this module.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
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
        wanted = {fault["point"] for fault in self._faults}
        self._forward, self._worker = (self._counts_points or point in wanted for point in ("forward", "worker"))
        if self._worker:
            os.register_at_fork(after_in_child=self._forked)
        self.write("start")

    def write(self, event: str, **more: object) -> None:
        """Appends a line to the journal."""
        who = {"start": self._start, "pid": os.getpid(), "rank": self._rank}
        line = {"event": event, "time": time.time(), **who, **more}
        with contextlib.suppress(OSError):
            os.write(self._journal, f"{json.dumps(line)}\n".encode())

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook."""
        if not event.startswith(PREFIX):
            return
        name = event[len(PREFIX) :]
        if name not in RECORDED:
            self.reach(name)
        elif name == "run":
            self._watch_modules()
        elif self._rank == 0 and not self._is_worker:
            self._record(name, arguments)

    def _record(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name != "stepped":
            self.write(name, checkpoint=list(arguments))
            return
        before = max(self._steps.values(), default=0)
        self._steps[arguments[0]] += 1
        if max(self._steps.values()) > before:  # of several optimizers one is counted
            self.write(name)

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

    # ---- points that are not raised as events ------------------------------------------------------------------------
    def _watch_modules(self) -> None:
        if self._forward:
            from torch.nn.modules.module import register_module_forward_pre_hook

            self._forward = False
            register_module_forward_pre_hook(lambda module, inputs: self.reach("forward"))

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


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
