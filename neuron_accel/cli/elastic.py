# SPDX-License-Identifier: Apache-2.0
"""Runs a :class:`~neuron_accel.cli.launch_plan.LaunchPlan` on torch's elastic agent, as torchrun does."""

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
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from neuron_accel.cli import rendezvous
from neuron_accel.cli._rank import ENDED_FILE, STARTED_FILE
from neuron_accel.cli.agent import Failures, run_agent
from neuron_accel.cli.escalation import Escalation, signal_ranks
from neuron_accel.cli.failures import RankFailure, RankSuccess, describe, first_failure
from neuron_accel.cli.heartbeat import Heartbeat
from neuron_accel.cli.launch_plan import RENDEZVOUS_SECONDS, LaunchPlan
from neuron_accel.cli.membership import Membership, NotNeeded, View
from neuron_accel.cli.restarts import Choice, Restarts, Start, choose_machines
from neuron_accel.cli.run_secret import RunSecret, take_secret
from neuron_accel.cli.snapshots import snapshot_folder
from neuron_accel.engine.plan.restart import FULL_SIZE, LAUNCHED, NOTES, Notes, read_notes
from neuron_accel.errors import CommunicationError
from neuron_accel.neuron.environment import ROOT_VARIABLE, with_host

ERROR_FILE = "error.json"
SILENT_EXIT_SECONDS = 5.0
AGENT_SECONDS = 30
"""Time in seconds that the agent of torch 2.9 gives the other ranks after a failure."""
MACHINE_SECONDS = 30.0
"""Time in seconds for which the launchers wait at a restart for a machine that is not known to be lost, in addition to
heartbeat and grace."""
TERMINAL = ""
"""The value by which the elastic agent denotes a stream that is not redirected."""


class RankLogs(LogsSpecs):
    """Redirects the output of each rank to ``ROOT/rank_N/{stdout,stderr}.log``, to the terminal, or to both.

    Args:
        root: the folder for logs; created if it is missing.
        tee: whether to show the output of the other ranks in the terminal as well.
        keep_first: whether to write logs of the first rank of this machine too. If not, it writes to the terminal only
            and without redirection, so that progress bars work.
    """

    def __init__(self, root: Path, *, tee: bool, keep_first: bool) -> None:
        super().__init__(log_dir=str(root))
        self.root, self.tee, self.keep_first = root, tee, keep_first
        self.folders: dict[int, Path] = {}
        self._started_before = 0
        self.start: int | None = None
        """Number of the start, from 0, if the machines agree on it; else it follows from those of this launcher."""
        self.are_named = False
        """Whether a message about a failure has named one of the files."""

    def begin(self, started_before: int) -> None:
        """Forgets the ranks of an earlier start.

        Args:
            started_before: how often this launcher has started the ranks before.
        """
        self.folders, self._started_before = {}, started_before

    @property
    def root_log_dir(self) -> str:
        return str(self.root)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Creates the folders of the ranks; called by the agent at every (re)start.

        Args:
            envs: environment of each rank, by local rank.
        """
        destination = LogsDest()
        for local_rank, env in envs.items():
            attempt = self._started_before + int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
            attempt = attempt if self.start is None else self.start
            env["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
            folder = self.root / (f"rank_{env['RANK']}" + (f"_attempt_{attempt}" if attempt else ""))
            folder.mkdir(parents=True, exist_ok=True)
            self.folders[int(env["RANK"])] = folder
            error_file = folder / ERROR_FILE
            for note in (error_file, folder / STARTED_FILE, folder / ENDED_FILE):
                note.unlink(missing_ok=True)
            env["TORCHELASTIC_ERROR_FILE"] = destination.error_files[local_rank] = str(error_file)
            self._place(destination, local_rank, folder)
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

    def stderr_of(self, rank: int) -> Path | None:
        path = self.folders[rank] / "stderr.log"
        return path if path.exists() else None


class SilentExits:
    """A context manager that reports ranks of this machine which ended without an error and without reaching the end of
    the script, while the launch continues: the other ranks may wait for them.

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
        while not self._over.wait(1.0):
            for rank, folder in list(self._logs.folders.items()):
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
    """Whether a rank was started and has ended without reporting an error."""
    pid = _note(folder / STARTED_FILE).get("pid")
    if pid is None or (folder / ENDED_FILE).exists() or (folder / ERROR_FILE).exists():
        return False
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a launch ended: by a signal to the launcher, with failed ranks, or successfully (neither)."""

    signal: int | None = None
    failures: Sequence[RankFailure] = ()
    successes: Sequence[RankSuccess] = ()
    log_dir: Path | None = None


def run_ranks(plan: LaunchPlan) -> Outcome:
    """Starts the ranks of this machine and waits for them. The secret of the run is not passed on to the ranks.

    Raises:
        ConfigurationError: if the secret of the run cannot be used.
        CommunicationError: if the rendezvous of the machines failed.
    """
    os.environ.update({setting.name: setting.value for setting in plan.settings})
    launched = time.time()
    os.environ[LAUNCHED] = str(launched)
    secret = take_secret(os.environ, plan.request.secret_file)
    _silence_agent()
    log_dir = Path(plan.request.log_dir or tempfile.mkdtemp(prefix="neuron_accel_"))
    logs = RankLogs(log_dir, tee=plan.request.tee, keep_first=plan.request.log_dir is not None)
    keep = plan.request.log_dir is not None
    try:
        with (
            tempfile.TemporaryDirectory(prefix="neuron_accel_notes_") as notes,
            snapshot_folder(plan.request.max_restarts),
            Escalation(grace=plan.request.grace),
            _heartbeat(plan, secret, Path(notes), launched) as heartbeat,
            SilentExits(logs),
        ):
            membership = heartbeat if isinstance(heartbeat, Membership) else None
            outcome = _run_until_done(plan, logs, Path(notes), membership)
            if membership is not None:
                membership.succeeds = not outcome.failures
        keep = keep or logs.are_named
        return outcome
    except SignalException as ended:
        signal_ranks(signal.SIGKILL)  # processes that survived a second signal
        return Outcome(signal=int(ended.sigval))
    except (RendezvousError, DistError, TimeoutError) as error:
        raise CommunicationError(
            f"The rendezvous at {plan.endpoint} failed: {str(error).splitlines()[0]}",
            where=f"launch on {plan.request.nnodes} machine(s)",
            fix="check that a launcher runs on every machine, with the same --nnodes, --master-addr and --master-port "
            "and its own --node-rank, and that machine 0 can be reached at this port",
        ) from error
    finally:
        if not keep:
            shutil.rmtree(log_dir, ignore_errors=True)


def _run_until_done(plan: LaunchPlan, logs: RankLogs, notes: Path, membership: Membership | None) -> Outcome:
    """Starts the ranks, again after one has failed, as often as the request allows.

    On several machines torch's agents restart their ranks.
    """
    request = plan.request
    alone = request.nnodes == 1
    restarts = Restarts(
        ranks=request.nproc_per_node,
        least=request.min_nproc_per_node or request.nproc_per_node,
        most_restarts=request.max_restarts if alone else 0,
    )
    start: Start | None = restarts.first
    if request.min_nproc_per_node is not None or request.min_nnodes is not None:
        os.environ[NOTES] = str(notes)
    while start is not None:
        outcome = _run_once(plan, logs, start, membership)
        if not outcome.failures:
            break
        start = restarts.after(first_failure(outcome.failures).rank, read_notes(notes))
        if start is not None:
            print(f"neuron-accel: {describe(outcome.failures, outcome.successes)}", file=sys.stderr)
            print(f"neuron-accel: {start.why}", file=sys.stderr, flush=True)
    return outcome


def _rendezvous(plan: LaunchPlan, logs: RankLogs, membership: Membership) -> rendezvous.ElasticRendezvous:
    """The rendezvous of a run that may continue without some machines."""

    def begins(view: View) -> None:
        logs.start = view.number - 1
        os.environ.pop(FULL_SIZE, None)
        if view.full_size is not None:
            os.environ[FULL_SIZE] = str(view.full_size)
        os.environ[LAUNCHED] = str(view.launched)
        for setting in plan.settings:
            if setting.name == ROOT_VARIABLE:  # the runtime's first rank may be on another machine now
                os.environ[ROOT_VARIABLE] = with_host(setting.value, view.first_host)
        if view.why:
            print(f"neuron-accel: {view.why}", file=sys.stderr, flush=True)

    port = int(plan.endpoint.rpartition(":")[2])
    return rendezvous.ElasticRendezvous(membership, first_port=port, timeout=RENDEZVOUS_SECONDS, begins=begins)


def _run_once(plan: LaunchPlan, logs: RankLogs, start: Start, membership: Membership | None) -> Outcome:
    logs.begin(start.number)
    if start.full_size is not None:
        os.environ[FULL_SIZE] = str(start.full_size)

    def report(failures: Failures, number: int) -> None:
        logs.are_named = True
        described = describe(_failures(failures, logs, grace), _successes(failures, logs))
        print(f"neuron-accel: {described}", file=sys.stderr)
        print(f"neuron-accel: restart {number} of {plan.request.max_restarts}", file=sys.stderr, flush=True)

    config, command = _config(plan, logs, start.ranks), [sys.executable, *plan.command(os.getpid())]
    grace = int(getattr(config, "shutdown_timeout", AGENT_SECONDS))
    try:
        if config.max_restarts:  # on several machines
            run_agent(config, command, report, None if membership is None else _rendezvous(plan, logs, membership))
        else:
            elastic_launch(config, command[0])(*command[1:])
    except NotNeeded:
        print("neuron-accel: the run has ended well without this machine", file=sys.stderr, flush=True)
    except ChildFailedError as error:
        logs.are_named = True
        failed, successes = error.failures, _successes(error.failures, logs)
        return Outcome(failures=_failures(failed, logs, grace), successes=successes, log_dir=logs.root)
    return Outcome()


def _heartbeat(
    plan: LaunchPlan, secret: RunSecret | None, notes: Path, launched: float
) -> contextlib.AbstractContextManager[Any]:
    request = plan.request
    if plan.heartbeat == 0 or secret is None:
        return contextlib.nullcontext()
    options: dict[str, Any] = {
        "secret": secret,
        "lost_after": plan.heartbeat,
        "grace": request.grace,
        "interface": request.socket_interface,
    }
    address = (request.master_addr or "127.0.0.1", plan.heartbeat_port)
    least = request.min_nnodes
    if least is None:
        return Heartbeat(request.node_rank, request.nnodes, address, **options)

    def choose(here: Sequence[int], noted: Notes, last: Sequence[int]) -> Choice:
        ranks, machines = request.nproc_per_node, request.nnodes
        return choose_machines(here, machines=machines, ranks=ranks, least=least, notes=noted, last=last)

    return Membership(
        request.node_rank,
        request.nnodes,
        address,
        ranks=request.nproc_per_node,
        choose=choose,
        read_notes=lambda: read_notes(notes),
        launched=launched,
        patience=plan.heartbeat + request.grace + MACHINE_SECONDS,
        first_patience=RENDEZVOUS_SECONDS,
        **options,
    )


def _config(plan: LaunchPlan, logs: RankLogs, ranks: int) -> LaunchConfig:
    request = plan.request
    config = LaunchConfig(
        min_nodes=request.nnodes,
        max_nodes=request.nnodes,
        nproc_per_node=ranks,
        run_id="neuron_accel" if plan.is_static else uuid.uuid4().hex,
        rdzv_backend=rendezvous.register() if request.nnodes == 1 else "static",
        rdzv_endpoint=plan.endpoint,
        rdzv_configs={"timeout": RENDEZVOUS_SECONDS, **({"rank": request.node_rank} if request.nnodes > 1 else {})},
        max_restarts=request.max_restarts if request.nnodes > 1 else 0,
        local_addr="127.0.0.1" if request.nnodes == 1 else None,
        logs_specs=logs,
        log_line_prefix_template="[rank ${rank}] ",
    )
    if hasattr(config, "shutdown_timeout"):  # torch 2.9 always waits AGENT_SECONDS
        config.shutdown_timeout = int(request.grace)
    return config


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
                stderr=logs.stderr_of(rank),
            )
        )
    return failures


def _successes(failed: Failures, logs: RankLogs) -> list[RankSuccess]:
    """The ranks of this machine that ended with exit code 0, with what they recorded at their end.

    On torch 2.9 those that recorded it only: its agent does not report the ranks that it ended as a consequence.
    """
    host, found, reports_all = socket.gethostname(), [], hasattr(LaunchConfig, "shutdown_timeout")
    for rank, folder in logs.folders.items():
        note = _note(folder / ENDED_FILE)
        if rank not in failed and (note or reports_all):
            found.append(RankSuccess(rank=rank, host=host, ended=note.get("time"), left_at=note.get("left_at")))
    return found


def _note(path: Path) -> dict[str, Any]:
    """The content of a file that a rank has written; empty if it is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}
