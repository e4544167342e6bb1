# SPDX-License-Identifier: Apache-2.0
"""Runs a :class:`~neuron_accel.launch.plan.LaunchPlan` on torch's elastic agent, as torchrun does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, ProcessFailure, SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from neuron_accel.engine.plan.restart import RUN, WAITING_FILE
from neuron_accel.errors import CommunicationError
from neuron_accel.launch._rank import ENDED_FILE, STARTED_FILE, STOPPED_FILE
from neuron_accel.launch.failures import RankFailure, RankSuccess, describe, first_failure, signal_name
from neuron_accel.launch.lost import End, Watch
from neuron_accel.launch.plan import LaunchPlan
from neuron_accel.launch.rendezvous import Start, rendezvous_of
from neuron_accel.launch.signals import Escalation, end_ranks, signal_ranks
from neuron_accel.neuron.environment import ROOT_VARIABLE, with_host

ERROR_FILE = "error.json"
SILENT_EXIT_SECONDS = 5.0
ENDS_IN_TIME = hasattr(LaunchConfig, "shutdown_timeout")
"""Whether the agent gives the other ranks the time of ``--grace`` after a failure; that of torch 2.9 always
:data:`AGENT_SECONDS`."""
AGENT_SECONDS = 30
TERMINAL = ""
"""The value by which the elastic agent denotes a stream that is not redirected."""
Failures = Mapping[int, ProcessFailure]
"""The failures of ranks, by global rank."""


class RankLogs(LogsSpecs):
    """Redirects the output of each rank to ``ROOT/rank_N/{stdout,stderr}.log``, to the terminal, or to both.

    Args:
        root: the folder for logs; created if it is missing.
        notes: a folder for what ranks note about their end, which may be on another disk, since that of logs may be
            full.
        tee: whether to show the output of the other ranks in the terminal as well.
        keep_first: whether to write logs of the first rank of this machine too. If not, it writes to the terminal only
            and without redirection, so that progress bars work.
        runtime: address at which ranks of the Neuron runtime meet, if the launcher has chosen it.
    """

    def __init__(self, root: Path, notes: Path, *, tee: bool, keep_first: bool, runtime: str | None = None) -> None:
        super().__init__(log_dir=str(root))
        self.root, self._notes, self.tee, self.keep_first, self._runtime = root, notes, tee, keep_first, runtime
        self.folders: dict[int, Path] = {}
        self.notes: dict[int, Path] = {}
        self.shown: set[int] = set()
        """Ranks whose error output is shown in the terminal."""
        self.start: Start | None = None
        self.are_named = False
        """Whether a message about a failure has named one of the files."""

    def begin(self, start: Start) -> None:
        """Forgets the ranks of an earlier start."""
        self.folders, self.notes, self.shown, self.start = {}, {}, set(), start

    @property
    def root_log_dir(self) -> str:
        return str(self.root)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Creates the folders of the ranks; called by the agent at every (re)start.

        Args:
            envs: environment of each rank, by local rank.
        """
        assert self.start is not None
        destination = LogsDest()
        for local_rank, env in envs.items():
            attempt = self.start.number
            env["TORCHELASTIC_RESTART_COUNT"], env[RUN] = str(attempt), self.start.run
            if self._runtime is not None and self.start.machines > 1:  # its first rank may be on any machine
                env[ROOT_VARIABLE] = with_host(self._runtime, env["MASTER_ADDR"])
            rank = int(env["RANK"])
            folder = self.root / (f"rank_{rank}" + (f"_attempt_{attempt}" if attempt else ""))
            folder.mkdir(parents=True, exist_ok=True)
            notes = self._notes / folder.name
            notes.mkdir(exist_ok=True)
            self.folders[rank], self.notes[rank] = folder, notes
            env["TORCHELASTIC_ERROR_FILE"] = destination.error_files[local_rank] = str(notes / ERROR_FILE)
            self._place(destination, local_rank, folder)
            if self.tee or local_rank == 0:
                self.shown.add(rank)
        return destination

    def _place(self, destination: LogsDest, local_rank: int, folder: Path) -> None:
        if local_rank == 0 and not self.keep_first:
            destination.stdouts[local_rank] = destination.stderrs[local_rank] = TERMINAL
            return
        destination.stdouts[local_rank] = str(folder / "stdout.log")
        destination.stderrs[local_rank] = str(folder / "stderr.log")
        if self.tee or local_rank == 0:
            destination.tee_stdouts[local_rank] = destination.stdouts[local_rank]
            destination.tee_stderrs[local_rank] = destination.stderrs[local_rank]

    def reports(self) -> dict[int, str]:
        """What ranks say of ranks that they wait for."""
        found = {}
        for rank, folder in list(self.notes.items()):
            with contextlib.suppress(OSError):
                found[rank] = (folder / WAITING_FILE).read_text().rstrip()
        return found

    def stderr_of(self, rank: int) -> Path | None:
        path = self.folders[rank] / "stderr.log"
        return path if path.exists() else None


class SilentExits:
    """A context manager that reports ranks of this machine which ended without an error and without reaching the end of
    the script, while the launch continues: the other ranks may wait for them. Shows what ranks without a terminal say
    of ranks that they wait for.

    Args:
        logs: the folders in which the ranks record their start and end.
        after: seconds after its end when a rank is reported.
    """

    def __init__(self, logs: RankLogs, *, after: float = SILENT_EXIT_SECONDS) -> None:
        self._logs, self._after = logs, after
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="neuron_accel_silent_exits")

    def __enter__(self) -> SilentExits:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        gone: dict[Path, float] = {}
        told: dict[int, str] = {}
        while not self._over.wait(1.0):
            before, told = told, self._logs.reports()
            for rank, report in told.items():
                if report and before.get(rank) != report and rank not in self._logs.shown:
                    print(report, file=sys.stderr, flush=True)
            for rank, folder in list(self._logs.notes.items()):
                if folder not in gone and _is_gone(folder):
                    gone[folder] = time.monotonic()
                elif folder in gone and time.monotonic() - gone[folder] > self._after:
                    gone[folder] = math.inf
                    print(
                        f"neuron-accel: rank {rank} on {socket.gethostname()} ended before the end of the script "
                        "without an error, as with os._exit; the other ranks may wait for it",
                        file=sys.stderr,
                        flush=True,
                    )


def _is_gone(folder: Path) -> bool:
    """Whether a rank was started and has ended without noting why: an error, its end, or that a signal ended it."""
    pid = _note(folder / STARTED_FILE).get("pid")
    if pid is None or any((folder / name).exists() for name in (ENDED_FILE, ERROR_FILE)):
        return False
    with contextlib.suppress(OSError):
        if (folder / STOPPED_FILE).stat().st_size:
            return False
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a launch ended: by a signal to the launcher, by what happened on another machine, with failed ranks, or
    successfully (none of these)."""

    signal: int | None = None
    end: End | None = None
    failures: Sequence[RankFailure] = ()
    successes: Sequence[RankSuccess] = ()
    reports: Sequence[str] = ()
    log_dir: Path | None = None


def run_ranks(plan: LaunchPlan) -> Outcome:
    """Starts the ranks of this machine and waits for them.

    Raises:
        CommunicationError: if the rendezvous of the machines failed.
    """
    os.environ.update({setting.name: setting.value for setting in plan.settings})
    _silence_agent()
    log_dir = Path(plan.request.log_dir or tempfile.mkdtemp(prefix="neuron_accel_"))
    keep = plan.request.log_dir is not None
    runtime = next((setting.value for setting in plan.settings if setting.name == ROOT_VARIABLE), None)
    launch: Launch | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="neuron_accel_notes_") as notes, Escalation(grace=plan.request.grace):
            logs = RankLogs(log_dir, Path(notes), tee=plan.request.tee, keep_first=keep, runtime=runtime)
            with SilentExits(logs):
                launch = Launch(plan, logs)
                outcome = launch.run()
        keep = keep or logs.are_named
        return outcome
    except SignalException as ended:
        if launch is not None:
            launch.say(128 + int(ended.sigval), f"its launcher was ended by {signal_name(int(ended.sigval))}")
        signal_ranks(signal.SIGKILL)  # processes that survived a second signal
        return Outcome(signal=int(ended.sigval))
    except (RendezvousError, DistError, TimeoutError) as error:
        if launch is not None and (end := launch.end) is not None:
            return Outcome(end=end)
        fix = (
            "check that the port is free, and how many files a process may have open (ulimit -n)"
            if plan.is_loopback
            else "check that a launcher runs on every machine, with the same options but for its own --node-rank, and "
            "that the rendezvous can be reached at this port"
        )
        without_text = "the run has ended" if isinstance(error, RendezvousClosedError) else type(error).__name__
        raise CommunicationError(
            f"The rendezvous at {plan.endpoint} failed: {next(iter(str(error).splitlines()), without_text)}",
            where=f"launch on {plan.request.nnodes} machine(s)",
            fix=fix,
        ) from error
    finally:
        if launch is not None:
            launch.close()
        if not keep:
            shutil.rmtree(log_dir, ignore_errors=True)


class Launch:
    """The starts of the ranks of this machine."""

    def __init__(self, plan: LaunchPlan, logs: RankLogs) -> None:
        self._plan, self._logs = plan, logs
        self._watch: Watch | None = None
        self._rendezvous = rendezvous_of(plan, leaves=self._leave, begins=self._begin)

    @property
    def end(self) -> End | None:
        """Why another machine has ended the start; None if none has."""
        return None if self._watch is None else self._watch.end

    def say(self, code: int, what: str, *, is_final: bool | None = None) -> None:
        """Ends the start on the other machines. It is the end of the run unless that continues on fewer machines."""
        if self._watch is not None:
            self._watch.say(code=code, what=what, is_final=not self._plan.is_elastic if is_final is None else is_final)

    def close(self) -> None:
        """Leaves the start."""
        self._leave()

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    def _begin(self, start: Start) -> None:
        self._logs.begin(start)
        if start.machines == 1 or not self._plan.heartbeat:
            return
        if start.store is None:
            how = f"the rendezvous {self._plan.backend} has no TCP store"
            print(f"neuron-accel: lost machines are not noticed: {how}", file=sys.stderr, flush=True)
        else:
            self._watch = Watch(
                start,
                lost_after=self._plan.heartbeat,
                is_elastic=self._plan.is_elastic,
                end_ranks=lambda: end_ranks(self._plan.request.grace),
            )

    def run(self) -> Outcome:
        """Starts the ranks, again after one has failed, as often as the request allows, or after the machines have
        changed."""
        restarts = 0
        while True:
            outcome = self._run_once()
            if outcome.failures and self.end is None:
                first, is_last = first_failure(outcome.failures), restarts == self._plan.request.max_restarts
                if first.raised is not None and self._watch is not None:
                    self._watch.wait_for_cause()
                self.say(first.shell_code, f"rank {first.rank} failed first: {first.how}", is_final=is_last)
                if self.end is None and is_last:
                    break
                if self.end is None:
                    restarts += 1
                    print(
                        f"neuron-accel: {describe(outcome.failures, outcome.successes, outcome.reports)}",
                        file=sys.stderr,
                    )
                    again = f"restart {restarts} of {self._plan.request.max_restarts}"
                    print(f"neuron-accel: {again}", file=sys.stderr, flush=True)
                    continue
            if self.end is None or self.end.is_final:
                outcome = dataclasses.replace(outcome, end=self.end)
                break
        if self._watch is None or self._watch.has_store:
            self._rendezvous.shutdown()
        return outcome

    def _run_once(self) -> Outcome:
        request, logs = self._plan.request, self._logs
        command = self._plan.command(os.getpid())
        spec = WorkerSpec(
            role="default_role",
            local_world_size=request.nproc_per_node,
            entrypoint=sys.executable,
            args=tuple(command),
            rdzv_handler=self._rendezvous,
            max_restarts=0,
            monitor_interval=0.1,
            local_addr=None,
        )
        options: dict[str, Any] = {"log_line_prefix_template": "[rank ${rank}] "}
        if ENDS_IN_TIME:
            options["shutdown_timeout"] = int(request.grace)
        result = LocalElasticAgent(spec=spec, logs_specs=logs, **options).run()
        if result is None:
            print("neuron-accel: the run has ended without this machine", file=sys.stderr, flush=True)
        if result is None or not result.is_failed():
            return Outcome()
        logs.are_named = True
        grace = int(request.grace) if ENDS_IN_TIME else AGENT_SECONDS
        failed, successes = result.failures, _successes(result.failures, logs)
        reports = [*logs.reports().values()]
        return Outcome(failures=_failures(failed, logs, grace), successes=successes, reports=reports, log_dir=logs.root)


def _silence_agent() -> None:
    """Disables the agent's logging, which repeats the messages of this launcher, unless LOGLEVEL is set."""
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)


def _failures(failed: Failures, logs: RankLogs, grace: int) -> list[RankFailure]:
    """The failures of ranks.

    SIGKILL within the grace was not sent by this launcher. It is the cause, even if the launcher noticed it late, as
    when a machine is overloaded, and the other ranks noticed before that their connections had closed.

    Args:
        failed: the failures that the agent reports.
        logs: the output of the ranks.
        grace: seconds after a failure when the agent kills the other ranks.
    """
    failures, first = [], min(failure.timestamp for failure in failed.values())
    for rank, failure in failed.items():
        is_killed_by_another = failure.exitcode == -signal.SIGKILL and failure.timestamp < first + grace
        message: dict[str, Any] = failure.message if isinstance(failure.message, dict) else {}
        failures.append(
            RankFailure(
                rank=rank,
                exit_code=failure.exitcode,
                noticed=first if is_killed_by_another else failure.timestamp,
                summary=message.get("message", "").partition("\n")[0] or None,
                raised=message.get("extraInfo", {}).get("time"),
                stack=message.get("extraInfo", {}).get("py_callstack", ""),
                stderr=logs.stderr_of(rank),
            )
        )
    return failures


def _successes(failed: Failures, logs: RankLogs) -> list[RankSuccess]:
    """The ranks of this machine that ended with exit code 0, with what they recorded at their end.

    On torch 2.9 those that recorded it only: its agent does not report the ranks that it ended as a consequence.
    """
    host, found, reports_all = socket.gethostname(), [], ENDS_IN_TIME
    for rank, folder in logs.notes.items():
        note = _note(folder / ENDED_FILE)
        if rank not in failed and (note or reports_all):
            found.append(RankSuccess(rank=rank, host=host, ended=note.get("time"), left_at=note.get("left_at")))
    return found


def _note(path: Path) -> dict[str, Any]:
    """The content of a file that a rank has written; empty if it is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}
