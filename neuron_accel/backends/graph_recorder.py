# SPDX-License-Identifier: Apache-2.0
"""Records the graphs that an XLA rank executes, so that they can be checked without the device.

Recording is enabled if the environment variable ``NEURON_ACCEL_RECORD_GRAPHS`` names a folder. Each rank writes one
line per execution to ``rank00003.jsonl``, and each distinct graph is a file ``graphs/HASH.pb``, an ``HloModuleProto``.
If ``XLA_FLAGS`` makes XLA write dumps to ``dumps`` in the same folder, the graph is taken from the dump, since only the
dump says which inputs are donated; otherwise the graph is lowered a second time.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from neuron_accel.errors import CommunicationError

VARIABLE = "NEURON_ACCEL_RECORD_GRAPHS"
DUMPED = "*.before_optimizations.hlo.pb"


class GraphRecorder:
    """Records the graphs of one rank.

    Args:
        folder: the folder to write to.
        rank: this rank.
        device: its XLA device.
        exchange: an all-gather of strings over given ranks, this one included; None if ranks that execute different
            graphs do not deadlock.
        scanning: a lock that is held while a rank inspects all objects of its process.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        device: torch.device,
        exchange: Callable[[str, tuple[int, ...]], Sequence[str]] | None,
        scanning: AbstractContextManager[Any],
    ) -> None:
        import torch_xla

        self._graphs, self._dumps = folder / "graphs", folder / "dumps"
        self._lines = folder / f"rank{rank:05d}.jsonl"
        self._device, self._exchange, self._scanning = device, exchange, scanning
        self._graphs.mkdir(parents=True, exist_ok=True)
        torch_xla._XLAC._set_ir_debug(True)  # operations record their source location

    @classmethod
    def of_environment(
        cls,
        rank: int,
        device: torch.device,
        exchange: Callable[[str, tuple[int, ...]], Sequence[str]] | None,
        scanning: AbstractContextManager[Any],
    ) -> GraphRecorder | None:
        """Returns a recorder if the environment variable is set, else None."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder), rank, device, exchange, scanning) if folder else None

    def before(self, ranks: tuple[int, ...]) -> str | None:
        """Records the graph that ``ranks`` are about to execute. Returns its hash, or None if no graph is pending.

        Raises:
            CommunicationError: if ``ranks`` have different graphs, which would deadlock.
        """
        import torch_xla

        if self._exchange is not None:
            self._exchange("", ranks)  # a barrier, after which all ranks have released their temporary tensors
        tensors = self._pending()
        name = torch_xla._XLAC._get_graph_hash(tensors).hex() if tensors else ""
        if name and not (self._graphs / f"{name}.pb").exists():
            self._write(self._graphs / f"{name}.pb", torch_xla._XLAC._get_xla_tensors_hlo_proto(tensors))
        apart = sum(1 for _ in self._dumps.glob(DUMPED))
        everyone = [name] if self._exchange is None else list(self._exchange(name, ranks))
        if any(everyone):  # also on a rank without a graph, so that the lines of all ranks correspond
            self._note({"graph": name or None, "ranks": list(ranks), "apart": apart})
        if len({*everyone} - {""}) > 1:
            raise CommunicationError(
                f"The ranks {list(ranks)} are about to execute {len({*everyone})} different graphs.",
                where="a step on XLA",
                why="collectives complete only if all ranks execute the same graph: these ranks would wait forever",
                fix="find the difference with neuron-accel precompile --check; make values that differ between ranks "
                "tensors, not Python numbers",
            )
        return name or None

    @contextmanager
    def compiling(self, name: str | None) -> Iterator[None]:
        """Context for one rank that compiles a graph while no other rank compiles. Keeps XLA's dump of that graph."""
        before = set(self._dumps.glob(DUMPED))
        yield
        new = set(self._dumps.glob(DUMPED)) - before
        if name is not None and len(new) == 1:
            os.replace(new.pop(), self._graphs / f"{name}.pb")
        for other in self._dumps.glob("*"):  # mostly machine code
            if not other.match(DUMPED):
                other.unlink(missing_ok=True)

    def _pending(self) -> list[torch.Tensor]:
        """Returns the tensors of Python whose values are pending on the device, in the order of their creation, which
        is the same on ranks that run the same code."""
        import torch_xla

        lib = torch_xla._XLAC
        found: dict[int, torch.Tensor] = {}
        # Locked: this list would keep alive tensors that another rank releases meanwhile, and add them to its graph.
        with self._scanning:
            mine = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and self._is_here(t)]
        for tensor in [*mine, *(t.grad for t in mine if t.is_leaf and t.grad is not None)]:
            if self._is_here(tensor):
                with contextlib.suppress(RuntimeError):  # a tensor subclass that wraps tensors of the list
                    found.setdefault(lib._xla_get_tensor_id(tensor), tensor)
        ordered = [tensor for _, tensor in sorted(found.items())]
        return [tensor for tensor in ordered if lib._check_tensor_need_materialization([tensor])[0]]

    def _is_here(self, tensor: torch.Tensor) -> bool:
        with contextlib.suppress(ReferenceError, RuntimeError):  # a tensor under construction, or a dead weak proxy
            return tensor.device == self._device
        return False

    def _note(self, line: dict[str, Any]) -> None:
        with self._lines.open("a") as file:
            print(json.dumps(line), file=file)

    def _write(self, path: Path, data: bytes) -> None:
        partial = path.with_suffix(f".{self._lines.stem}")
        partial.write_bytes(data)
        os.replace(partial, path)
