# SPDX-License-Identifier: Apache-2.0
"""How launchers meet: torch's rendezvous, with a store for the ranks of each start.

Restarted ranks must not read the addresses of the previous ones, so every start has a new store. On one machine it
listens on the loopback interface only. torch's own listens on all interfaces, and so does the store of several
machines: any program that reaches the port can read and write it.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from neuron_accel.launch.host import address_towards, listen, must_host
from neuron_accel.launch.plan import RENDEZVOUS_SECONDS, LaunchPlan
from neuron_accel.launch.request import STATIC, rendezvous_settings

LOOPBACK = "127.0.0.1"
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's variable, by which its dynamic rendezvous keeps no store for the ranks of all starts, where they would find
addresses of earlier ones."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the ranks.

    Args:
        number: how often ranks of this run were started before.
        run: identifies the run, on all machines and in all of its starts.
        machine: index of this machine among those that take part.
        machines: how many take part.
        store: the launchers' store; None on one machine, or if it is none of torch's TCP stores.
    """

    number: int
    run: str
    machine: int = 0
    machines: int = 1
    store: TCPStore | None = None


class LoopbackRendezvous(RendezvousHandler):
    """Gives the ranks of one machine a store on the loopback. The agent's own store is in its memory.

    Args:
        port: port of the store; 0 for a free one.
        begins: is called before the ranks of each start.
    """

    def __init__(self, port: int, begins: Callable[[Start], None]) -> None:
        self._port, self._begins = port, begins
        self._run_id, self._starts = uuid.uuid4().hex, 0
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "loopback"

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
        self._store = _serve(listener)
        self._begins(Start(number=self._starts, run=self._run_id))
        self._starts += 1
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


def _serve(listener: socket.socket) -> TCPStore:
    """Returns a store that serves at a listening socket, which it takes over."""
    host, port = listener.getsockname()[:2]
    host, timeout = LOOPBACK if host in ("0.0.0.0", "::") else host, timedelta(seconds=RENDEZVOUS_SECONDS)
    descriptor = listener.detach()
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor)


class MachinesRendezvous(RendezvousHandler):
    """One of torch's rendezvous of several machines, in which the machines agree on the number of each start and on a
    new store for its ranks.

    Args:
        inner: torch's.
        leaves: is called when this machine has ended a start.
        begins: is called before the ranks of each start.
    """

    def __init__(self, inner: RendezvousHandler, leaves: Callable[[], None], begins: Callable[[Start], None]) -> None:
        self._inner, self._leaves, self._begins = inner, leaves, begins
        self._starts = 0
        self._ranks_store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the other machines. See torch's rendezvous for its errors."""
        self._leaves()
        self._ranks_store = None
        info = self._inner.next_rendezvous()
        base, store = _tcp_store(info.store), info.store
        if self.get_backend() == STATIC:  # the others give each start a store with a prefix of its own
            store = PrefixStore(f"start{self._starts}", store)
        self._starts += 1
        if info.rank == 0:
            number = self._starts - 1 if base is None else base.add(f"starts of {self.get_run_id()}", 1) - 1
            found = self._serve(info, number)
            store.set("number", str(number))
            store.set("ranks' store", f"{found.master_port} {found.master_addr}")
        number = int(store.get("number"))
        port, _, host = store.get("ranks' store").decode().partition(" ")
        run = self.get_run_id()
        if base is not None:
            run = base.compare_set(f"id of {run}", "", uuid.uuid4().hex).decode()
        self._begins(Start(number=number, run=run, machine=info.rank, machines=info.world_size, store=base))
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(host, int(port)))

    def _serve(self, info: RendezvousInfo, number: int) -> RendezvousStoreInfo:
        """The store of the ranks of a start: that of the launchers at the first of a static rendezvous."""
        found = info.bootstrap_store_info
        assert found is not None
        if number == 0 and self.get_backend() == STATIC:
            return found
        self._ranks_store = _serve(listen(found.master_addr, 0))
        return RendezvousStoreInfo(found.master_addr, self._ranks_store.port)

    def get_backend(self) -> str:
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        self._ranks_store = None
        return self._inner.shutdown()


def _tcp_store(store: Store) -> TCPStore | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def rendezvous_of(
    plan: LaunchPlan, *, leaves: Callable[[], None], begins: Callable[[Start], None]
) -> RendezvousHandler:
    """The rendezvous of a launch; see :class:`MachinesRendezvous`.

    Raises:
        torch.distributed.elastic.rendezvous.RendezvousError: if the endpoint cannot be reached.
    """
    request = plan.request
    if plan.is_loopback:
        return LoopbackRendezvous(int(plan.endpoint.rpartition(":")[2]), begins)
    host = plan.endpoint.rpartition(":")[0] or plan.endpoint
    if plan.backend == STATIC:
        configs: dict[str, object] = {"rank": request.node_rank, "timeout": RENDEZVOUS_SECONDS}
    else:
        configs = {"join_timeout": RENDEZVOUS_SECONDS}
        if (is_host := must_host(host)) is not None:
            configs["is_host"] = is_host
    parameters = RendezvousParameters(
        backend=plan.backend,
        endpoint=plan.endpoint,
        run_id=request.rdzv_id,
        min_nodes=plan.fewest,
        max_nodes=request.nnodes,
        local_addr=address_towards(host, request.socket_interface),
        **{**configs, **rendezvous_settings(request.rdzv_conf)},
    )
    os.environ[OWN_STORE] = "1"
    return MachinesRendezvous(get_rendezvous_handler(parameters), leaves, begins)
