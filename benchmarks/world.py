"""A run of many ranks in one process: each is a thread, with the package's own code over a network that counts.

Only the network is simulated: a store, groups, and messages between threads. Sent and received messages are counted as
gloo performs a collective: a broadcast is a binomial tree, an all-gather a ring.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import queue
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration

from neuron_accel.backends import process_group, torch_distributed
from neuron_accel.backends.dry_run import DryRunBackend
from neuron_accel.backends.events import Event, Observer
from neuron_accel.backends.torch_distributed import TorchBackend
from neuron_accel.checkpoint.state.session import Session, Source
from neuron_accel.checkpoint.state.training import TrainingObjects
from neuron_accel.engine.optim.reducer import Trainable
from neuron_accel.engine.plan.registry import default_registry
from neuron_accel.engine.runtime.run import Run
from neuron_accel.loop import prepare, unprepared
from neuron_accel.loop.interruption import Interruption
from neuron_accel.loop.start import begin

STACK = 512 << 10
PATIENCE = 600.0
KINDS = ("store", "messages", "bytes", "peers", "groups", "connections", "opens", "stats", "read")


# ---- the network -----------------------------------------------------------------------------------------------------
class Network:
    """What connects the ranks of a simulated run.

    Args:
        size: number of ranks.
        delay: the most seconds that a rank waits before it makes a group, at random.

    Attributes:
        counts: what each rank has done since it began its present part.
        peers: the ranks with which each rank has exchanged messages in this part.
    """

    def __init__(self, size: int, delay: float = 0.0) -> None:
        self.size, self.delay = size, delay
        self.counts = [Counter[str]() for _ in range(size)]
        self.peers: list[set[int]] = [set() for _ in range(size)]
        self._self, self._lock = threading.local(), threading.Lock()
        self._mail: defaultdict[Any, queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)
        self._meetings: dict[Any, _Meeting] = {}
        self.failed = threading.Event()
        self._store = dist.HashStore()
        self._random = random.Random(size)

    # ---- this thread -------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        self._self.rank, self._self.made = rank, Counter()
        self._self.store, self._self.world = _Store(self._store, self), None
        self._self.world = _Group(self, tuple(range(self.size)), 0)
        yield

    @property
    def rank(self) -> int | None:
        return getattr(self._self, "rank", None)

    def count(self, kind: str, number: int = 1) -> None:
        if (rank := self.rank) is not None:
            self.counts[rank][kind] += number

    def message(self, peer: int, size: int) -> None:
        """Counts a message to or from another rank."""
        self.count("messages")
        self.count("bytes", size)
        self.peers[self._self.rank].add(peer)

    def mail(self, *address: Any) -> queue.SimpleQueue[torch.Tensor]:
        with self._lock:
            return self._mail[address]

    def meeting(self, key: Any, size: int) -> _Meeting:
        with self._lock:
            found = self._meetings.setdefault(key, _Meeting(size))
            found.left -= 1
            if not found.left:
                del self._meetings[key]
            return found

    def meet(self, name: str) -> None:
        """Waits for all ranks, uncounted."""
        self.meeting(("part", name), self.size).put(self._self.rank, None, self)

    # ---- torch.distributed, as far as the backend calls it -----------------------------------------------------------
    ReduceOp = dist.ReduceOp

    @property
    def group(self) -> Any:
        return SimpleNamespace(WORLD=self._self.world)

    def is_initialized(self) -> bool:
        return self.rank is not None

    def get_rank(self) -> int:
        return int(self._self.rank)

    def get_world_size(self) -> int:
        return self.size

    def get_backend_config(self) -> str:
        return "cpu:gloo"

    def default_store(self) -> Any:
        return self._self.store

    def new_group(self, ranks: list[int], **_: Any) -> Any:
        """Members wait for each other. The others only count the group, as in torch."""
        made = self._self.made["groups"]
        self._self.made["groups"] += 1
        if self._self.rank not in ranks:
            return None
        self.count("groups")
        self.count("connections", len(ranks) - 1)
        if self.delay:
            time.sleep(self._random.uniform(0, self.delay))
        group = _Group(self, tuple(ranks), made + 1)
        group.met("made").put(group.index, None, self)
        return group

    def destroy_process_group(self, group: Any = None) -> None:
        pass

    def barrier(self, group: Any = None) -> None:
        group = group or self._self.world
        for bit in range(max(1, (group.size() - 1).bit_length())):  # dissemination
            self.message(group.ranks[(group.index + (1 << bit)) % group.size()], 1)
        group.met("barrier").put(group.index, None, self)

    def broadcast(self, tensor: torch.Tensor, source: int, group: Any) -> None:
        group.broadcast(tensor, group.ranks.index(source))


class _Store(dist.Store):
    """The store of the run, as one rank sees it."""

    def __init__(self, store: Any, network: Network) -> None:
        super().__init__()
        self._store, self._network = store, network

    def _called(self, name: str, *args: Any) -> Any:
        self._network.count("store")
        return getattr(self._store, name)(*args)

    def set(self, key: str, value: Any) -> None:
        self._called("set", key, value)

    def get(self, key: str) -> bytes:
        return self._called("get", key)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        return self._called("add", key, amount)  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        return self._called("check", keys)  # type: ignore[no-any-return]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._called("multi_get", keys)  # type: ignore[no-any-return]


class _Meeting:
    """A collective of some ranks: what each has brought."""

    def __init__(self, size: int) -> None:
        self.left, self._missing, self.brought, self._all = size, size, [None] * size, threading.Event()
        self._lock = threading.Lock()

    def put(self, index: int, value: Any, network: Network) -> list[Any]:
        with self._lock:
            self.brought[index] = value
            self._missing -= 1
            if not self._missing:
                self._all.set()
        end = time.monotonic() + PATIENCE
        while not self._all.wait(5.0):
            if network.failed.is_set() or time.monotonic() > end:
                raise TimeoutError("a rank has not come")
        return self.brought


class _Done:
    def wait(self) -> bool:
        return True


class _Group:
    """A process group, as one of its ranks has it. Tensors are on the CPU.

    Args:
        network: the network.
        ranks: of the group.
        number: how many groups this rank knew before.
    """

    def __init__(self, network: Network, ranks: tuple[int, ...], number: int) -> None:
        self._network, self.ranks, self._number, self._calls = network, ranks, number, Counter[str]()
        self.index = ranks.index(network.get_rank())

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return len(self.ranks)

    def met(self, op: str) -> _Meeting:
        self._calls[op] += 1
        return self._network.meeting((self._number, self.ranks, op, self._calls[op]), len(self.ranks))

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> _Done:
        self._network.message(self.ranks[target], tensors[0].nbytes)
        self._network.mail(self._number, self.ranks, self.index, target, tag).put(tensors[0].clone())
        return _Done()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Done:
        mail, end = self._network.mail(self._number, self.ranks, source, self.index, tag), time.monotonic() + PATIENCE
        while True:
            try:
                tensors[0].copy_(mail.get(timeout=5.0))
                break
            except queue.Empty:
                if self._network.failed.is_set() or time.monotonic() > end:
                    raise TimeoutError("a message has not come") from None
        self._network.message(self.ranks[source], tensors[0].nbytes)
        return _Done()

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> _Done:
        size = len(self.ranks)
        for peer in ((self.index + 1) % size, (self.index - 1) % size):
            for _ in range(size - 1):
                self._network.message(self.ranks[peer], inputs[0].nbytes)
        for out, value in zip(
            outputs[0], self.met("allgather").put(self.index, inputs[0].clone(), self._network), strict=True
        ):
            out.copy_(value)
        return _Done()

    def broadcast(self, tensor: torch.Tensor, source: int) -> _Done:
        size = len(self.ranks)
        place, bit = (self.index - source) % size, 1
        while bit < size and not place & bit:
            if place + bit < size:
                self._network.message(self.ranks[(place + bit + source) % size], tensor.nbytes)
            bit *= 2
        if place:
            self._network.message(self.ranks[(place - bit + source) % size], tensor.nbytes)
        brought = self.met("broadcast").put(self.index, tensor.clone() if not place else None, self._network)
        if place:
            tensor.copy_(brought[source])
        return _Done()


# ---- files -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _counted_files(network: Network) -> Iterator[None]:
    """Counts, for each rank, files opened for reading, sizes that were asked for, and bytes read."""

    def counting(function: Callable[..., Any], kind: str, when: Callable[..., bool]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                network.count(kind)
            return function(*args, **kwargs)

        return counted

    def reads(_: Any, flags: int, *more: Any, **kwargs: Any) -> bool:
        return flags & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY) == 0

    def opens(file: Any, mode: str = "r", *more: Any, **kwargs: Any) -> bool:
        return not isinstance(file, int) and "r" in mode and not str(file).startswith("/proc/")

    with (
        mock.patch.object(os, "open", counting(os.open, "opens", reads)),
        mock.patch.object(os, "stat", counting(os.stat, "stats", lambda *_, **__: True)),
        mock.patch.object(builtins, "open", counting(builtins.open, "opens", opens)),
    ):
        yield


def _bytes_read() -> int:
    """Bytes that this thread has read from files so far."""
    try:
        return int(Path("/proc/thread-self/io").read_text().split()[1])
    except OSError:
        return 0


# ---- a run -----------------------------------------------------------------------------------------------------------
@dataclass
class Part:
    """What the ranks of a run did in a part of it.

    Args:
        main: counts of the main process.
        most: the largest count of another rank, of each kind.
        total: of all ranks.
        cpu: seconds of a processor of the rank that needed most but for the main process, and of all.
    """

    main: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    total: Counter[str] = field(default_factory=Counter)
    cpu: tuple[float, float] = (0.0, 0.0)

    def __str__(self) -> str:
        kinds = [kind for kind in KINDS if self.total[kind]]
        shown = ", ".join(f"{kind} {self.most[kind]:,} ({self.main[kind]:,}; {self.total[kind]:,})" for kind in kinds)
        return f"{shown}, processor {self.cpu[0]:.3f} s ({self.cpu[1]:.1f} s for all)"


class _Player:
    """One rank of a run, that counts what it does in each part."""

    def __init__(self, network: Network, rank: int, parts: dict[str, list[tuple[Counter[str], float]]]) -> None:
        self._network, self._rank, self._parts = network, rank, parts

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        network, rank = self._network, self._rank
        network.meet(name)
        network.counts[rank].clear()
        network.peers[rank].clear()
        read, begun = _bytes_read(), time.thread_time()
        network.counts[rank].clear()
        yield
        seconds, counts = time.thread_time() - begun, Counter(network.counts[rank])
        counts["read"], counts["peers"] = _bytes_read() - read, len(network.peers[rank])
        self._parts[name][rank] = counts, seconds
        network.meet(f"{name} ended")


def play(
    plugins: Callable[[], list[Any]], size: int, folder: Path, *, delay: float = 0.0, loads: bool = True
) -> dict[str, Part]:
    """Plays a run of ``size`` ranks in threads of this process: its start, an interruption, parameters that begin to
    train, a save and a load. Returns what the ranks did in each part.

    Args:
        plugins: returns the strategies, called once for each rank.
        size: number of ranks.
        folder: an existing folder, for the checkpoint.
        delay: the most seconds that a rank waits before it makes a group.
        loads: whether to save and load too.
    """
    network, registry = Network(size, delay), default_registry()
    parts: dict[str, list[Any]] = defaultdict(lambda: [None] * size)
    errors: list[BaseException] = []

    def rank_of(rank: int) -> None:
        try:
            with network.as_rank(rank):
                _play(_Player(network, rank, parts), plugins, registry, folder, loads)
        except BaseException as error:
            errors.append(error)
            network.failed.set()

    before = threading.stack_size(STACK)
    try:
        with (
            mock.patch.object(torch_distributed, "dist", network),
            mock.patch.object(process_group, "dist", network),
            mock.patch.object(dist.distributed_c10d, "_get_default_store", network.default_store),
            mock.patch.object(process_group, "let_threads_finish"),
            mock.patch.object(unprepared, "register_optimizer_step_pre_hook"),  # of all optimizers of all threads
            mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(size)}),
            _counted_files(network),
        ):
            threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        threading.stack_size(before)
    if errors:
        raise next((error for error in errors if not isinstance(error, TimeoutError)), errors[0])
    return {name: _summary(ranks) for name, ranks in parts.items()}


def _summary(ranks: list[tuple[Counter[str], float]]) -> Part:
    result, others = Part(main=ranks[0][0]), ranks[1:]
    for kind in KINDS:
        result.most[kind] = max((counts[kind] for counts, _ in others), default=0)
        result.total[kind] = sum(counts[kind] for counts, _ in ranks)
    result.cpu = max((seconds for _, seconds in others), default=0.0), sum(seconds for _, seconds in ranks)
    return result


def _play(player: _Player, plugins: Callable[[], list[Any]], registry: Any, folder: Path, loads: bool) -> None:
    network = player._network
    with player.part("start"):
        network.count("connections", network.size - 1)  # torch connects the world
        backend = TorchBackend(torch.device("cpu"))
        run = begin(plugins(), backend, registry, None)
    with player.part("interruption"):
        watch = Interruption(run, signals=())
    with player.part("five steps"):
        for call in range(5):
            if backend.rank:  # devices work asynchronously: others are at most two steps ahead, here none is
                network.meet(f"first {call}")
            watch._reason = "a test" if call == 1 and backend.rank == network.size - 1 else ""
            watch.requested()
            if not backend.rank:
                network.meet(f"first {call}")
    assert watch.requested()
    with player.part("begin to train"):
        Trainable(run)._meet(["weight"])
    if not loads:
        return
    with player.part("prepare"):
        model = torch.nn.Sequential(torch.nn.Linear(128, 64))
        record = prepare.prepare_model(
            model, run, device=None, wrap=lambda module: module, load=lambda _: None, training=True
        )
        optimizer = prepare.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), run, number=0)
        prepare.finish(run)
    training = TrainingObjects(run=run, models=[record], optimizers=[optimizer], counters={"step": 1})
    source = Source(
        run=run,
        project=ProjectConfiguration(),
        modules=lambda: [record.module],
        training=lambda _: training,
        save_hooks={},
        load_hooks={},
    )
    session = Session(source)
    with player.part("save"):
        session.save(folder / "checkpoint")
    with player.part("load"):
        session.load(folder / "checkpoint")


# ---- a step ----------------------------------------------------------------------------------------------------------
class _Begun(Observer):
    """Counts events as they begin."""

    categories = frozenset({"collective"})

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def begin(self, event: Event) -> None:
        self._counts[event.name] += 1


def step(plugins: list[Any], size: int) -> Counter[str]:
    """Returns how often one rank of ``size`` begins which collective in a step, in a dry run."""
    backend = DryRunBackend(world_size=size)
    run: Run = begin(plugins, backend, default_registry(), None)
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
    record = prepare.prepare_model(
        model, run, device=backend.device, wrap=lambda module: module, load=lambda _: None, training=True
    )
    optimizer = prepare.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), run, number=0)
    prepare.finish(run)
    begun = Counter[str]()

    for number in range(2):
        if number:
            backend.events.observe(_Begun(begun))
        with run.hooks.around(
            "backward_pass", record.module(torch.zeros(4, 128, device=backend.device)).sum(), run
        ) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return begun
