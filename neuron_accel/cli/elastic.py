"""Runs a :class:`~neuron_accel.cli.launch_plan.LaunchPlan` on torch's elastic agent, which is what torchrun runs on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from neuron_accel.cli._rank import ENDED_FILE
from neuron_accel.cli.escalation import Escalation, signal_ranks
from neuron_accel.cli.failures import RankFailure, RankSuccess
from neuron_accel.cli.heartbeat import Heartbeat
from neuron_accel.cli.launch_plan import RENDEZVOUS_SECONDS, LaunchPlan
from neuron_accel.errors import CommunicationError

TERMINAL = ""
"""The elastic agent's word for a stream that is not redirected."""


class RankLogs(LogsSpecs):
    """Says where the output of each rank goes: ``ROOT/rank_N/{stdout,stderr}.log``, or straight to the terminal.

    Args:
        root: the folder for logs; made if it is missing.
        tee: whether to show the output of the ranks after the first, too.
        keep_first: whether the first rank of this machine has logs as well. It writes straight to the terminal
            otherwise, so that progress bars work.
    """

    def __init__(self, root: Path, *, tee: bool, keep_first: bool) -> None:
        super().__init__(log_dir=str(root))
        self.root, self.tee, self.keep_first = root, tee, keep_first
        self.folders: dict[int, Path] = {}

    @property
    def root_log_dir(self) -> str:
        return str(self.root)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent at every start with the environment of each local rank; makes the folders."""
        destination = LogsDest()
        for local_rank, env in envs.items():
            attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
            folder = self.root / (f"rank_{env['RANK']}" + (f"_attempt_{attempt}" if attempt else ""))
            folder.mkdir(parents=True, exist_ok=True)
            self.folders[int(env["RANK"])] = folder
            error_file = folder / "error.json"
            error_file.unlink(missing_ok=True)
            (folder / ENDED_FILE).unlink(missing_ok=True)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a launch ended: by a signal to the launcher, with failed ranks, or well (neither)."""

    signal: int | None = None
    failures: Sequence[RankFailure] = ()
    successes: Sequence[RankSuccess] = ()
    log_dir: Path | None = None


def run_ranks(plan: LaunchPlan) -> Outcome:
    """Starts the ranks of this machine and waits for them.

    Raises:
        CommunicationError: the machines of the launch did not find each other.
    """
    os.environ.update({setting.name: setting.value for setting in plan.settings})
    _silence_agent()
    log_dir = Path(plan.request.log_dir or tempfile.mkdtemp(prefix="neuron_accel_"))
    logs = RankLogs(log_dir, tee=plan.request.tee, keep_first=plan.request.log_dir is not None)
    launch = elastic_launch(_config(plan, logs), sys.executable)
    keep = plan.request.log_dir is not None
    try:
        with Escalation(grace=plan.request.grace), _heartbeat(plan):
            launch(*plan.command(os.getpid()))
        return Outcome()
    except SignalException as ended:
        signal_ranks(signal.SIGKILL)  # those that a second signal left behind
        return Outcome(signal=int(ended.sigval))
    except ChildFailedError as error:
        keep = True
        return Outcome(failures=_failures(error, logs), successes=_successes(logs), log_dir=log_dir)
    except (RendezvousError, DistError, TimeoutError) as error:
        raise CommunicationError(
            f"The ranks could not meet at {plan.endpoint}: {str(error).splitlines()[0]}",
            where=f"rendezvous of {plan.request.nnodes} machine(s)",
            fix="Check that every machine was started, with the same --nnodes, --master-addr and --master-port and a "
            "--node-rank of its own, and that machine 0 can be reached on that port.",
        ) from error
    finally:
        if not keep:
            shutil.rmtree(log_dir, ignore_errors=True)


def _heartbeat(plan: LaunchPlan) -> contextlib.AbstractContextManager[Any]:
    if plan.request.nnodes == 1:
        return contextlib.nullcontext()
    address = (plan.request.master_addr or "127.0.0.1", plan.heartbeat_port)
    return Heartbeat(plan.request.node_rank, address, lost_after=plan.request.heartbeat, grace=plan.request.grace)


def _config(plan: LaunchPlan, logs: RankLogs) -> LaunchConfig:
    request = plan.request
    config = LaunchConfig(
        min_nodes=request.nnodes,
        max_nodes=request.nnodes,
        nproc_per_node=request.nproc_per_node,
        run_id="neuron_accel" if plan.is_static else uuid.uuid4().hex,
        rdzv_backend="static" if plan.is_static else "c10d",
        rdzv_endpoint=plan.endpoint,
        rdzv_configs={"timeout": RENDEZVOUS_SECONDS, **({"rank": request.node_rank} if plan.is_static else {})},
        max_restarts=request.max_restarts,
        local_addr="127.0.0.1" if request.nnodes == 1 else None,
        logs_specs=logs,
        log_line_prefix_template="[rank ${rank}] ",
    )
    if hasattr(config, "shutdown_timeout"):  # torch 2.9 always waits 30 s
        config.shutdown_timeout = int(request.grace)
    return config


def _silence_agent() -> None:
    """The agent narrates through several loggers what this launcher says once; LOGLEVEL brings it back."""
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)


def _failures(error: ChildFailedError, logs: RankLogs) -> list[RankFailure]:
    failures = []
    for rank, failure in error.failures.items():
        message: dict[str, Any] = failure.message if isinstance(failure.message, dict) else {}
        failures.append(
            RankFailure(
                rank=rank,
                exit_code=failure.exitcode,
                noticed=failure.timestamp,
                summary=message.get("message", "").partition("\n")[0] or None,
                raised=message.get("extraInfo", {}).get("time"),
                stderr=logs.stderr_of(rank),
            )
        )
    return failures


def _successes(logs: RankLogs) -> list[RankSuccess]:
    """The ranks of this machine that ended with success, as far as they could leave a note of it."""
    found = []
    for rank, folder in logs.folders.items():
        with contextlib.suppress(OSError, ValueError, KeyError):
            note = json.loads((folder / ENDED_FILE).read_text())
            found.append(RankSuccess(rank=rank, ended=float(note["time"]), left_at=note.get("left_at")))
    return found
