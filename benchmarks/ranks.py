"""What each rank of a large world does, counted in one process, with the product's own code.

Usage: ``python -m benchmarks.ranks [--world 8,64,512,4096] [--alarms N]``. Every rank is an object or a thread of this
process, and the store, the network and the file system count what is asked of them.

A part of a run is a line: the largest count of a rank other than the main process, and in parentheses that of the main
process and that of all ranks.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.world import play, step
from neuron_accel.backends.board import LocalBoard
from neuron_accel.checkpoint.format.files import checksums_of, number_of_blocks
from neuron_accel.checkpoint.format.index import INDEX, IndexPart, index_checkpoint
from neuron_accel.checkpoint.format.manifest import NAME, FileEntry, Manifest, read_manifest
from neuron_accel.checkpoint.state import load as load_module
from neuron_accel.checkpoint.state.save import SaveAttempt
from neuron_accel.checkpoint.state.snapshot import Item, RankFacts
from neuron_accel.checkpoint.state.training import Contents
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.engine.shards.partition import even
from neuron_accel.loop import watchdog
from neuron_accel.loop.watchdog import CollectiveWatchdog
from neuron_accel.strategies.fully_sharded.plugin import FullyShardedPlugin

WORLDS = (8, 64, 512, 4096)
MOST_SAVED = 512
"""Ranks of a run that also saves and loads. Together they read the manifest as often as there are ranks."""


# ---- an alarm --------------------------------------------------------------------------------------------------------
class CountingBoard(LocalBoard):
    """A board that counts operations of a store, as :class:`StoreBoard` performs them, for the rank ``of``.

    Args:
        before: is called before each operation, when another rank may act.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self.of, self.operations, self.before = 0, Counter[int](), before
        self.looks = Counter[int]()  # at the count of questions

    def _count(self, operations: int = 1) -> None:
        of = self.of
        self.before()
        self.of = of
        self.operations[of] += operations

    def put(self, key: str, note: bytes) -> None:
        self._count()
        super().put(key, note)

    def get(self, key: str) -> bytes | None:
        self._count(0 if key.endswith("/question") else 2)
        self.looks[self.of] += 2 if key.endswith("/question") else 0
        return super().get(key)

    def get_all(self, keys: Any) -> list[bytes | None]:
        self._count()
        notes = [LocalBoard.get(self, key) for key in keys]
        if None not in notes:
            self._count()
        elif len(keys) > 1:
            half = len(keys) // 2
            return self.get_all(keys[:half]) + self.get_all(keys[half:])
        return notes

    def add(self, key: str, amount: int) -> int:
        self._count()
        return super().add(key, amount)


@dataclass
class Alarm:
    """One long call of a simulated world.

    Args:
        operations: of the store, by rank, without looks for a question.
        looks: operations of the looks for a question, which ranks perform at any time.
        reports: seconds after the first rank began, and the ranks that were accused.
    """

    operations: Counter[int] = field(default_factory=Counter)
    looks: Counter[int] = field(default_factory=Counter)
    reports: list[tuple[float, list[int]]] = field(default_factory=list)


class _Rank(CollectiveWatchdog):
    """A rank of a simulated world, without a thread."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(SimpleNamespace(rank=rank, world_size=world.size, board=lambda: world.board), "world", 10.0)  # type: ignore[arg-type]
        self.is_looking, self._world = False, world

    def step(self) -> None:
        self.is_looking, self._world.board.of = True, self._rank
        self.look()
        self.is_looking = False

    def _place(self) -> str:
        return "train.py:1"

    def _said(self, call: Any, here: list[int], answers: Any) -> str:
        accused = [rank for rank in range(self._size) if rank not in here]
        self._world.alarm.reports.append((self._world.now, accused))
        return ""


class World:
    """Ranks of which each looks at the board about once a tick, at random times. With a probability of ``meddling``
    another rank looks before an operation on the board, within the look of the first.

    Args:
        size: number of ranks.
        seed: of what is random.
    """

    def __init__(self, size: int, seed: int, meddling: float = 0.05) -> None:
        self.size, self.now, self._random, self._meddling = size, 0.0, random.Random(seed), meddling
        self.board, self.alarm = CountingBoard(self._meddle), Alarm()
        self._silent: set[int] = set()
        self._ranks: list[_Rank] = []
        self._ranks += [_Rank(self, rank) for rank in range(size)]
        self._looks = [(self._random.uniform(0, each.tick), each._rank) for each in self._ranks]
        heapq.heapify(self._looks)

    def _meddle(self) -> None:
        if self._ranks and self._random.random() < self._meddling:
            other = self._random.randrange(self.size)
            if not self._ranks[other].is_looking and other not in self._silent:
                self._ranks[other].step()

    def call(
        self, seconds: float, *, apart: float = 5.0, absent: frozenset[int] = frozenset(), silent: bool = False
    ) -> Alarm:
        """Lets all ranks begin the same call, within ``apart`` seconds, and returns what they did for ``seconds``.

        Args:
            absent: ranks that do not begin it.
            silent: whether their threads have stopped too.
        """
        self.alarm, start = Alarm(), self.now
        self._silent = set(absent) if silent else set()
        self.board.operations.clear()
        self.board.looks.clear()
        begins = sorted(
            (start + self._random.uniform(0, apart), rank) for rank in range(self.size) if rank not in absent
        )
        event = SimpleNamespace(name="backward")
        with (
            mock.patch.object(watchdog, "time", SimpleNamespace(monotonic=lambda: self.now)),
            mock.patch("builtins.print"),
        ):
            while self._looks[0][0] < start + seconds:
                self.now, rank = self._looks[0]
                while begins and begins[0][0] <= self.now:
                    self.now, first = begins.pop(0)
                    self._ranks[first].begin(event)  # type: ignore[arg-type]
                self.now, each = self._looks[0][0], self._ranks[rank]
                if rank not in self._silent:
                    each.step()
                pause = each.tick / (2 if each._asking else 1)
                late = self._random.uniform(0.5, 1.5) if self._random.random() < 0.02 else 0.0
                heapq.heapreplace(self._looks, (self.now + pause * self._random.uniform(1.0, 1.05) + late, rank))
            self.now = start + seconds
            for rank, each in enumerate(self._ranks):
                if rank not in absent:
                    each.end(event)  # type: ignore[arg-type]
        alarm = self.alarm
        alarm.reports = [(when - start, ranks) for when, ranks in alarm.reports]
        alarm.operations, alarm.looks = Counter(self.board.operations), Counter(self.board.looks)
        return alarm


# ---- a checkpoint ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Model:
    """Shapes of a model like Llama.

    Args:
        layers, width, inner, keys, words: number of layers, sizes of hidden states and of MLPs, of all keys, and of the
            vocabulary.
    """

    layers: int = 80
    width: int = 8192
    inner: int = 28672
    keys: int = 1024
    words: int = 128256

    def buckets(self) -> list[list[tuple[str, tuple[int, ...]]]]:
        """Returns names and shapes of the parameters that are gathered together."""
        wide, narrow, inner = (self.width, self.width), (self.keys, self.width), (self.inner, self.width)
        projections = {"q": wide, "k": narrow, "v": narrow, "o": wide}
        result = [[("model.embed_tokens.weight", (self.words, self.width))]]
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            result.append([(f"{at}.self_attn.{name}_proj.weight", shape) for name, shape in projections.items()])
            result[-1] += [(f"{at}.mlp.{name}_proj.weight", inner) for name in ("gate", "up")]
            result[-1] += [(f"{at}.mlp.down_proj.weight", inner[::-1]), (f"{at}.input_layernorm.weight", wide[:1])]
            result[-1] += [(f"{at}.post_attention_layernorm.weight", wide[:1])]
        return [*result, [("model.norm.weight", wide[:1]), ("lm_head.weight", (self.words, self.width))]]


_STATES = ("model.0", "optimizer.0.state.exp_avg", "optimizer.0.state.exp_avg_sq", "optimizer.0.master")


@dataclass
class Load:
    """What one rank of a world does to load its own state again.

    Args:
        opens, stats, index_bytes, objects: files opened, files whose size was asked for, bytes of manifest and index,
            and parts of tensors in memory.
        headers, headers_bytes, chunks: files, bytes and objects of the headers of all files, which would say the same.
        received: parts of the index that the main process has joined.
        seconds: of a processor, for manifest and index.
    """

    opens: int = 0
    stats: int = 0
    index_bytes: int = 0
    objects: int = 0
    headers: int = 0
    header_bytes: int = 0
    chunks: int = 0
    received: int = 0
    seconds: float = 0.0


def _items(model: Model, ranks: int) -> Callable[[int], list[Item]]:
    """Returns what a rank writes of a model whose weights and state are fully sharded, by rank."""
    parts = [(bucket, even([math.prod(shape) for _, shape in bucket], ranks)) for bucket in model.buckets()]
    layouts = {name: Layout(shape=shape, dtype="float32") for bucket, _ in parts for name, shape in bucket}

    def of(rank: int) -> list[Item]:
        result = []
        for bucket, partition in parts:
            for span in partition.spans(rank):
                name = bucket[span.parameter][0]
                tensor, layout = torch.empty(span.stop - span.start, device="meta"), layouts[name]
                more: Any = {"name": name, "aliases": (), "layout": layout, "tensor": tensor}
                result += [Item(collection=each, start=span.start, stop=span.stop, **more) for each in _STATES]
        return result

    return of


class _Alone(SimpleNamespace):
    """A backend of one rank, for a save that only describes its files."""


def checkpoint(model: Model, ranks: int, folder: Path) -> Load:
    """Counts what the load of a checkpoint takes that ``ranks`` ranks have written, without the tensors."""
    items, load, written = _items(model, ranks), Load(), {}
    pending: list[tuple[int, IndexPart]] = []  # joined as payload.gather does: pairs of equal size
    for rank in range(ranks):
        attempt = object.__new__(SaveAttempt)
        attempt.contents, attempt.folder, attempt._generation = Contents(items=items(rank)), folder, 0
        attempt._facts, attempt._run = RankFacts(coordinates={"dp": rank}), _Alone(backend=_Alone(rank=rank))  # type: ignore[assignment]
        attempt._headers = {}
        size, part = 1, attempt._describe()
        for relative, (kind, _, header) in part.files.items():
            inside = sum(item.nbytes for item in attempt._by_file()[relative])
            written[relative] = FileEntry(
                size=header + inside, checksums=("0",) * number_of_blocks(header + inside), kind=kind
            )
            load.header_bytes += header
        load.chunks += len(attempt.contents.items)
        while pending and pending[-1][0] == size:
            part, size = pending.pop()[1].merge(part), 2 * size
        pending.append((size, part))
    while len(pending) > 1:
        (size, part), (before, one) = pending.pop(), pending.pop()
        pending.append((size + before, one.merge(part)))
    load.received, load.headers = math.ceil(math.log2(ranks)), len(written)
    contents = pending[0][1].to_bytes()
    (folder / "tensor_index.json").write_bytes(contents)
    written["tensor_index.json"] = FileEntry(size=len(contents), checksums=checksums_of(contents), kind=INDEX)
    manifest = Manifest(files=written).to_bytes()
    (folder / NAME).write_bytes(manifest)
    load.index_bytes = len(contents) + len(manifest)

    begin, rank = time.process_time(), ranks // 2
    index = index_checkpoint(folder, read_manifest(folder))
    opened: set[str] = set()
    for item in items(rank):
        source = index.collections[item.collection][item.name]
        source.check()
        for part in source.parts[()]:
            opened |= {str(chunk.path) for chunk in part.within(item.start or 0, item.stop or 0)}
    load.seconds, load.opens = time.process_time() - begin, 2 + len(opened)
    load.objects = sum(
        len(parts) for tensors in index.collections.values() for t in tensors.values() for parts in t.parts.values()
    )
    counted, world = Counter[str](), SimpleNamespace(world=SimpleNamespace(index=rank, size=ranks))
    count = {name: lambda *_, name=name: counted.update([name]) for name in ("check_size", "check_block")}
    with mock.patch.multiple(load_module, **count):
        load_module._checked(folder, world)  # type: ignore[arg-type]
    load.stats = counted["check_size"]
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", default=",".join(map(str, WORLDS)), help="numbers of ranks")
    parser.add_argument("--alarms", type=int, default=0, help="so many alarms of worlds of 2 to 12 ranks")
    options = parser.parse_args()
    plugins: Callable[[], list[Any]] = lambda: [FullyShardedPlugin(modules="*")]  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        play(plugins, 2, Path(folder))  # imports what is imported when it is needed
    for size in map(int, options.world.split(",")):
        print(f"{size} ranks: collectives of a rank in a step: {dict(step(plugins(), size))}")
        with tempfile.TemporaryDirectory() as folder:
            for name, part in play(plugins, size, Path(folder), loads=size <= MOST_SAVED).items():
                print(f"    {name}: {part}", flush=True)
        slow = World(size, 0).call(20.0)
        counts = slow.operations.values()
        print(
            f"{size} ranks, all in a call of 20 s: {sum(counts)} operations of the store, {max(counts)} of one rank, "
            f"{sum(slow.looks.values()) / 20:.0f} a second for looks, {len(slow.reports)} reports"
        )
        stuck = World(size, 0).call(20.0, absent=frozenset([size // 2]))
        print(f"    one is not: {stuck.reports}")
        with tempfile.TemporaryDirectory() as folder:
            print(f"    {checkpoint(Model(), size, Path(folder))}", flush=True)
    false = 0
    for seed in range(options.alarms // 4):
        size = random.Random(seed).randint(2, 12)
        world = World(size, seed, 0.3)
        false += sum(len(world.call(20.0, apart=9.0).reports) for _ in range(4))
    if options.alarms:
        print(f"{options.alarms // 4 * 4} alarms of 2 to 12 ranks, {false} of them false")


if __name__ == "__main__":
    main()
