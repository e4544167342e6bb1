# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of ranks: a store, a new one for each start, since restarted ranks must not read the addresses of the
previous ones.

On one machine the store listens on the loopback interface only. torch's own listens on all interfaces, and so does the
store of several machines: any program that reaches the port can read and write it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, HashStore, PrefixStore, TCPStore
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
from neuron_accel.cli.membership import Membership, View

BACKEND = "neuron_accel_loopback"
LOOPBACK = "127.0.0.1"
CONNECT_S = 30.0
"""Seconds in which a machine connects to the store of a start."""


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
        self._store = None  # shuts down the previous store, which may use the same port
        try:
            listener = listen(LOOPBACK, self._port)
        except OSError as error:
            raise RendezvousConnectionError(f"port {self._port} cannot be used: {error.strerror}") from error
        port = listener.getsockname()[1]
        self._store = _serve(listener, self._timeout)
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


class MachinesRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous of several machines, with a new store for the ranks of each restart.

    Machine 0 starts it at a free port, which it announces in the store of the first start; the other machines wait
    there for it.
    """

    _starts = 0
    _ranks_store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns the stores of a start: for the launchers, and for the ranks.

        Raises:
            torch.distributed.DistError: if machine 0 cannot be reached, or does not restart in time.
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
        port = int(store.get("port"))
        return RendezvousInfo(store, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, port))

    def shutdown(self) -> bool:
        self._ranks_store = None
        return super().shutdown()


class ElasticRendezvous(RendezvousHandler):
    """The rendezvous of machines of which some may be lost: the leader of each start has the store of its ranks.

    Args:
        membership: agrees on the machines of a start.
        first_port: port of the store of the first start; later ones have a free port.
        timeout: seconds that a rank waits for a key.
        begins: is called before the ranks of a start in which this machine takes part.
    """

    def __init__(
        self, membership: Membership, *, first_port: int, timeout: float, begins: Callable[[View], None]
    ) -> None:
        self._membership, self._first_port = membership, first_port
        self._timeout, self._begins = timedelta(seconds=timeout), begins
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "neuron_accel_elastic"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the next start, and returns its store.

        Raises:
            CommunicationError: if the run does not continue, or not with this machine.
            NotNeeded: if it has ended without this machine.
            RendezvousConnectionError: on the leader, if the port cannot be used.
        """
        while True:
            self._store = None
            view = self._membership.meet(self._serve)
            if view.leader != self._membership.machine:
                try:
                    timeout = timedelta(seconds=CONNECT_S)
                    self._store = TCPStore(*view.store, is_master=False, timeout=timeout, wait_for_workers=False)
                    self._store.set_timeout(self._timeout)
                except DistError:  # the leader is lost as well
                    continue
            assert self._store is not None
            self._begins(view)
            rank, store = view.machines.index(self._membership.machine), PrefixStore("launchers", self._store)
            return RendezvousInfo(store, rank, len(view.machines), RendezvousStoreInfo(*view.store))

    def _serve(self, host: str, number: int, interface: str | None) -> tuple[str, int]:
        port = self._first_port if number == 1 else 0
        try:
            listener = listen(host, port, interface=interface)
        except OSError as error:
            raise RendezvousConnectionError(f"port {port} cannot be used: {error.strerror}") from error
        port = listener.getsockname()[1]
        self._store = _serve(listener, self._timeout)
        return host, port

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "neuron_accel"

    def shutdown(self) -> bool:
        self._store = None
        return True


def _serve(listener: socket.socket, timeout: timedelta) -> TCPStore:
    """Returns a store that serves at a listening socket, which it takes over."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        LOOPBACK if host in ("0.0.0.0", "::") else host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def register() -> str:
    """Makes :class:`LoopbackRendezvous` known to torch's elastic agent; returns the name of the backend."""
    rendezvous_handler_registry.register(BACKEND, create)
    return BACKEND


def create(parameters: RendezvousParameters) -> LoopbackRendezvous:
    """The rendezvous for ``parameters``, of which the endpoint is ``address:port``."""
    port = int(parameters.endpoint.rpartition(":")[2])
    return LoopbackRendezvous(parameters.run_id, port, parameters.get_as_int("timeout", 900) or 900)
