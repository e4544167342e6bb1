# SPDX-License-Identifier: Apache-2.0
"""torch's elastic agent of one of several machines, which reports failures before each restart and agrees with the
other machines on the next rendezvous.

Without this, the agents of several machines restart their ranks silently, and only the last failure reaches the
launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig

from neuron_accel.cli.rendezvous import MachinesRendezvous

Failures = Mapping[int, ProcessFailure]
"""The failures of ranks, by global rank."""


class RestartingAgent(LocalElasticAgent):
    """An agent that calls ``on_restart`` with the failures and the number of the restart, before it restarts its ranks.

    Args:
        on_restart: the function.
        options: arguments of ``LocalElasticAgent``.
    """

    def __init__(self, on_restart: Callable[[Failures, int], None], **options: Any) -> None:
        super().__init__(**options)
        self._on_restart, self._restarts = on_restart, 0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            self._restarts += 1
            if self._restarts <= worker_group.spec.max_restarts:
                self._on_restart(result.failures, self._restarts)
        return result


def run_agent(
    config: LaunchConfig,
    command: Sequence[str],
    on_restart: Callable[[Failures, int], None],
    rendezvous: RendezvousHandler | None = None,
) -> None:
    """Runs the ranks of this machine, as ``torch.distributed.launcher.api.launch_agent`` does.

    Args:
        config: of a static rendezvous.
        command: the program of each rank and its arguments.
        on_restart: see :class:`RestartingAgent`.
        rendezvous: agrees on the machines of each start; None: all of ``config``.

    Raises:
        ChildFailedError: if a rank has failed, and there are no restarts left.
        SignalException: if the launcher got a signal.
        CommunicationError: if too many machines were lost.
        NotNeeded: if the run has ended well without this machine.
    """
    if rendezvous is None:
        address, _, port = config.rdzv_endpoint.rpartition(":")
        configs = config.rdzv_configs
        rendezvous = MachinesRendezvous(
            address, int(port), configs["rank"], config.max_nodes, config.run_id, configs["timeout"]
        )
    else:  # all machines have as many ranks, so that the agents need no store to number them
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=rendezvous,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
    )
    options: dict[str, Any] = {"log_line_prefix_template": config.log_line_prefix_template}
    if hasattr(config, "shutdown_timeout"):  # torch 2.9 always waits 30 s
        options["shutdown_timeout"] = config.shutdown_timeout
    agent = RestartingAgent(on_restart, spec=spec, logs_specs=config.logs_specs, **options)
    try:
        result = agent.run()
    except SignalException:  # the other machines continue the rendezvous
        raise
    except BaseException:
        rendezvous.shutdown()
        raise
    rendezvous.shutdown()
    if result.is_failed():
        raise ChildFailedError(name=command[0], failures=result.failures)
