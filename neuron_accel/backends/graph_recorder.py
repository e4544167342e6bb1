"""Writes down the graphs that an XLA rank executes, so that they can be checked without the device.

On where the variable ``NEURON_ACCEL_RECORD_GRAPHS`` names a folder. There each rank leaves a line for every execution
(``rank00003.jsonl``), and each different graph is a file (``graphs/HASH.pb``, an ``HloModuleProto``). A graph is taken
from the dump that XLA itself writes while compiling, if ``XLA_FLAGS`` asks for one into ``dumps`` of the same folder,
because only that one says which inputs give up their memory; else it is lowered a second time.
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
    """Of one rank.

    Args:
        folder: where to.
        rank: this one.
        device: its XLA device.
        exchange: gives the values of several ranks, this one included, to all of them; None where ranks that execute
            different graphs do not wait for each other without end.
        scanning: is held while a rank looks at all objects of its process.
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
        torch_xla._XLAC._set_ir_debug(True)  # operations know the code that they come from

    @classmethod
    def of_environment(
        cls,
        rank: int,
        device: torch.device,
        exchange: Callable[[str, tuple[int, ...]], Sequence[str]] | None,
        scanning: AbstractContextManager[Any],
    ) -> GraphRecorder | None:
        """One if the variable is set."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder), rank, device, exchange, scanning) if folder else None

    def before(self, ranks: tuple[int, ...]) -> str | None:
        """Notes the graph that ``ranks`` are about to execute, if there is one. Returns its hash.

        Raises:
            CommunicationError: if they have different ones, and would wait for each other without end.
        """
        import torch_xla

        if self._exchange is not None:
            self._exchange("", ranks)  # so that all have let go of what they do not keep
        tensors = self._pending()
        name = torch_xla._XLAC._get_graph_hash(tensors).hex() if tensors else ""
        if name and not (self._graphs / f"{name}.pb").exists():
            self._write(self._graphs / f"{name}.pb", torch_xla._XLAC._get_xla_tensors_hlo_proto(tensors))
        apart = sum(1 for _ in self._dumps.glob(DUMPED))
        everyone = [name] if self._exchange is None else list(self._exchange(name, ranks))
        if any(everyone):  # also on a rank that has nothing, so that the lines of all ranks are about the same time
            self._note({"graph": name or None, "ranks": list(ranks), "apart": apart})
        if len({*everyone} - {""}) > 1:
            raise CommunicationError(
                f"The ranks {list(ranks)} are about to execute {len({*everyone})} different graphs.",
                where="a step on XLA",
                why="collectives meet in equal graphs only: these ranks would wait for each other without end",
                fix="see what differs: neuron-accel precompile --check; make what differs between ranks a tensor, not "
                "a Python number",
            )
        return name or None

    @contextmanager
    def compiling(self, name: str | None) -> Iterator[None]:
        """While one rank compiles a graph, and no other does anything: takes XLA's own dump of it."""
        before = set(self._dumps.glob(DUMPED))
        yield
        new = set(self._dumps.glob(DUMPED)) - before
        if name is not None and len(new) == 1:
            os.replace(new.pop(), self._graphs / f"{name}.pb")
        for other in self._dumps.glob("*"):  # code for this machine, mostly
            if not other.match(DUMPED):
                other.unlink(missing_ok=True)

    def _pending(self) -> list[torch.Tensor]:
        """What is still to be computed on the device, of the tensors that Python knows, in the order in which they were
        made, which is the same on ranks that do the same."""
        import torch_xla

        lib = torch_xla._XLAC
        found: dict[int, torch.Tensor] = {}
        with (
            self._scanning
        ):  # a list of what another rank lets go meanwhile would keep it, and make it a part of its graph
            mine = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and self._is_here(t)]
        for tensor in [*mine, *(t.grad for t in mine if t.is_leaf and t.grad is not None)]:
            if self._is_here(tensor):
                with contextlib.suppress(RuntimeError):  # a wrapper of others, which are in the list themselves
                    found.setdefault(lib._xla_get_tensor_id(tensor), tensor)
        ordered = [tensor for _, tensor in sorted(found.items())]
        return [tensor for tensor in ordered if lib._check_tensor_need_materialization([tensor])[0]]

    def _is_here(self, tensor: torch.Tensor) -> bool:
        with contextlib.suppress(ReferenceError, RuntimeError):  # half of a tensor, or a proxy of none
            return tensor.device == self._device
        return False

    def _note(self, line: dict[str, Any]) -> None:
        with self._lines.open("a") as file:
            print(json.dumps(line), file=file)

    def _write(self, path: Path, data: bytes) -> None:
        partial = path.with_suffix(f".{self._lines.stem}")
        partial.write_bytes(data)
        os.replace(partial, path)
