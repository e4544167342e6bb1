# SPDX-License-Identifier: Apache-2.0
"""Where ranks find each other: a store, which is a new one for each start, since restarted ranks must not read the
addresses of the ranks before them.

On one machine it listens on the loopback only, while torch's own listens on all interfaces, as that of several machines
does here: whoever reaches the port can read and write the store.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from neuron_accel.cli.host import listen
from neuron_accel.cli.restarts import Choice
from neuron_accel.errors import CommunicationError

BACKEND = "neuron_accel_loopback"
LOOPBACK = "127.0.0.1"
POLL_S = 0.2


class LoopbackRendezvous(RendezvousHandler):
    """Gives the ranks of one machine a store on the loopback, a new one for each start. The agent's own store is in its
    memory.

    Args:
        run_id: name of the run.
        port: port of the store; 0 for a free one.
        timeout: seconds that a rank waits for a key.
    """

    def __init__(self, run_id: str, port: int, timeout: float) -> None:
        self._run_id, self._port, self._timeout = run_id, port, timedelta(seconds=timeout)
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Starts a store for the ranks.

        Raises:
            RendezvousConnectionError: if the port cannot be used.
        """
        self._store = None  # ends the one before, which may have the same port
        try:
            listener = listen(LOOPBACK, self._port)
        except OSError as error:
            raise RendezvousConnectionError(f"port {self._port} cannot be used: {error.strerror}") from error
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


class Members:
    """Agrees on the machines that go on after one was lost.

    Args:
        machines: their number at the first start.
        lost: returns those that are known to be lost. Used on machine 0, as is ``choose``.
        choose: returns those that go on, of those that are there.
        begins: is called on each machine that goes on.
        patience: seconds after which a machine that has not come is lost too.
    """

    def __init__(
        self,
        machines: int,
        *,
        lost: Callable[[], Collection[int]],
        choose: Callable[[Sequence[int]], Choice],
        begins: Callable[[Choice], None],
        patience: float,
    ) -> None:
        self._expected = list(range(machines))
        self._lost, self._choose, self._begins, self._patience = lost, choose, begins, patience

    def meet(self, store: Store, machine: int) -> Sequence[int]:
        """Returns the machines that go on. Called on each machine at each start but the first.

        Raises:
            CommunicationError: if the run does not go on, or without this machine.
        """
        store.set(f"here{machine}", "")
        if machine == 0:
            choice = self._choose(self._wait(store))
            self._expected = list(choice.machines)
            store.set("members", json.dumps(dataclasses.asdict(choice)))
        choice = Choice(**json.loads(store.get("members")))
        if machine not in choice.machines:
            raise CommunicationError(
                f"Machine {machine} does not take part any more: {choice.why}.",
                where="restart of several machines",
                fix="launch again with the machines that there are",
            )
        self._begins(choice)
        return choice.machines

    def _wait(self, store: Store) -> list[int]:
        deadline = time.monotonic() + self._patience
        while True:
            here = [machine for machine in self._expected if store.check([f"here{machine}"])]
            lost = set(self._lost())
            if lost.issuperset(set(self._expected) - set(here)) or time.monotonic() > deadline:
                return [machine for machine in here if machine not in lost]
            time.sleep(POLL_S)


class MachinesRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous of several machines, with a new store for the ranks of each restart.

    Machine 0 starts it at a free port, which it announces in the store of the first start; the other machines wait
    there for it. If some machines may be lost, machine 0 waits for those that are not, and then says which go on.

    Args:
        arguments: of torch's class.
        members: on machine 0 chooses those that go on; None: all machines have to.
    """

    _starts = 0
    _ranks_store: TCPStore | None = None

    def __init__(self, *arguments: Any, members: Members | None = None) -> None:
        super().__init__(*arguments)
        self._members = members

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the stores of a start: for the launchers, and for the ranks.

        Raises:
            torch.distributed.DistError: if machine 0 cannot be reached, or does not restart in time.
            CommunicationError: if the run does not go on, or without this machine.
        """
        found = super().next_rendezvous()
        self._starts += 1
        if self._starts == 1:
            return found
        store = PrefixStore(f"start{self._starts}", found.store)
        if self.rank == 0:
            self._ranks_store = TCPStore(
                self.master_addr, 0, is_master=True, timeout=self.timeout, wait_for_workers=False
            )
            store.set("port", str(self._ranks_store.port))
        machines = range(self.world_size) if self._members is None else self._members.meet(store, self.rank)
        port = int(store.get("port"))
        of_ranks = RendezvousStoreInfo(self.master_addr, port)
        return RendezvousInfo(store, machines.index(self.rank), len(machines), of_ranks)

    def shutdown(self) -> bool:
        self._ranks_store = None
        return super().shutdown()


def register() -> str:
    """Makes :class:`LoopbackRendezvous` known to torch's elastic agent; returns the name of the backend."""
    rendezvous_handler_registry.register(BACKEND, create)
    return BACKEND


def create(parameters: RendezvousParameters) -> LoopbackRendezvous:
    """The rendezvous for ``parameters``, of which the endpoint is ``address:port``."""
    port = int(parameters.endpoint.rpartition(":")[2])
    return LoopbackRendezvous(parameters.run_id, port, parameters.get_as_int("timeout", 900) or 900)
