# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory that a graph needs: the largest number of bytes that are live at once.

The estimate follows the order of the instructions in the graph; the compiler reorders, fuses and tiles them. It counts

- inputs for the whole graph, since the caller keeps them; donated ones until the last instruction that reads them; one
  that is aliased with an output once;
- constants;
- each result from its instruction to the last one that reads it, or to the end if it is an output.

Views (reshapes, tuples, barriers) and broadcasts need no memory of their own. An element-wise instruction reuses the
memory of an operand of the same size that is not read any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from neuron_accel_emulation.hlo import Computation, Instruction, Module

_VIEWS = frozenset(
    {"reshape", "bitcast", "tuple", "get-tuple-element", "opt-barrier", "broadcast", "after-all", "domain"}
)
_FREE = frozenset({"parameter", "constant", "iota", "after-all", "partition-id", "replica-id"})
_ELEMENT_WISE = (
    "abs add and atan2 ceil clamp compare convert copy cosine divide exponential exponential-minus-one floor imag "
    "is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt power real remainder "
    "round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine "
    "sqrt subtract tan tanh xor"
)
_IN_PLACE = frozenset({*_ELEMENT_WISE.split(), "all-reduce", "dynamic-update-slice", "scatter"})
_CALLS = frozenset({"call", "while", "conditional", "fusion"})


@dataclass(frozen=True, kw_only=True)
class LiveBytes:
    """The memory that a graph needs.

    Args:
        peak: largest number of bytes that are live at once.
        at: the instruction at the peak.
        inputs: bytes of all inputs.
        outputs: bytes of the outputs that are not aliased with an input.
        largest: the largest results that are live at the peak: (instruction, bytes), in descending order.
    """

    peak: int
    at: Instruction
    inputs: int
    outputs: int
    largest: tuple[tuple[Instruction, int], ...] = ()


def live_bytes(module: Module) -> LiveBytes:
    """Estimates the memory of a module, from shapes without padding."""
    return _Walk(module, module.entry, is_entry=True).result()


class _Walk:
    """One pass over the instructions of a computation."""

    def __init__(self, module: Module, computation: Computation, *, is_entry: bool) -> None:
        self._module, self._computation, self._is_entry = module, computation, is_entry
        self._holds = self._what_each_holds()
        self._last_read = self._last_reads()

    def _what_each_holds(self) -> dict[int, frozenset[int]]:
        """For each instruction, the ids of the instructions whose memory contains its value."""
        holds: dict[int, frozenset[int]] = {}
        elements: dict[int, list[frozenset[int]]] = {}  # of tuples created in this computation
        for instruction in self._computation.instructions:
            operands = [holds[operand] for operand in instruction.operands]
            held = frozenset[int]().union(*operands)
            if instruction.opcode == "tuple":
                elements[instruction.id] = operands
            elif instruction.opcode == "opt-barrier" and instruction.operands[0] in elements:
                elements[instruction.id] = elements[instruction.operands[0]]
            elif instruction.opcode == "get-tuple-element" and instruction.operands[0] in elements:
                held = elements[instruction.operands[0]][instruction.index]
            elif instruction.opcode not in _VIEWS:
                held = frozenset() if instruction.opcode == "iota" else frozenset({instruction.id})
            holds[instruction.id] = held
        return holds

    def _last_reads(self) -> dict[int, int]:
        """For each instruction with its own memory, the position of the last instruction that reads it."""
        order = self._computation.instructions
        last = {instruction.id: place for place, instruction in enumerate(order)}
        for place, instruction in enumerate(order):
            if instruction.opcode in _VIEWS and instruction.id != self._computation.root:
                continue  # a view does not read memory; its readers do
            for operand in instruction.operands:
                for held in self._holds[operand]:
                    last[held] = max(last[held], place)
        for held in self._holds[self._computation.root]:
            last[held] = len(order)  # live after the end
        return last

    def result(self) -> LiveBytes:
        """Runs through the instructions."""
        order = self._computation.instructions
        parameters = [i for i in order if i.opcode == "parameter"]
        inputs = sum(i.shape.bytes for i in parameters)
        outputs, given = self._outputs()
        live: dict[int, int] = {}
        now = 0
        if self._is_entry:
            now = inputs + sum(i.literal_bytes for i in order if i.opcode == "constant")
            live = {i.id: i.shape.bytes for i in parameters if i.parameter in self._module.donors}
        peak, at, at_peak = now, order[0], dict[int, int]()
        for place, instruction in enumerate(order):
            dying = [i for i in live if self._last_read[i] == place]
            own = 0 if instruction.opcode in _FREE | _VIEWS or instruction.id in given else instruction.shape.bytes
            reused = None
            if own and instruction.opcode in _IN_PLACE:
                reused = next((i for i in dying if live[i] == own and i in self._read_by(instruction)), None)
            if reused is not None:
                now -= live.pop(reused)
                dying.remove(reused)
            if own:
                live[instruction.id] = own
                now += own
            inside = self._inside(instruction)
            if now + inside > peak:
                peak, at, at_peak = now + inside, instruction, dict(live)
            for number in dying:
                now -= live.pop(number)
            if own and self._last_read[instruction.id] <= place:  # nothing reads it
                now -= live.pop(instruction.id)
        by_id = self._computation.by_id
        largest = sorted(((by_id[i], size) for i, size in at_peak.items()), key=lambda item: -item[1])
        return LiveBytes(peak=peak, at=at, inputs=inputs, outputs=outputs, largest=tuple(largest[:8]))

    def _read_by(self, instruction: Instruction) -> set[int]:
        return {held for operand in instruction.operands for held in self._holds[operand]}

    def _outputs(self) -> tuple[int, set[int]]:
        """Bytes of outputs that are not aliased, and ids of instructions whose results use the memory of an input."""
        root = self._computation.by_id[self._computation.root]
        parts = root.operands if root.opcode == "tuple" else (root.id,)
        taken = {path[0] if path else 0 for path in self._module.aliases.values()} if self._is_entry else set()
        given: set[int] = set()
        own = 0
        for index, part in enumerate(parts):
            makers = [self._computation.by_id[held] for held in self._holds[part]]
            if index in taken:
                given |= {maker.id for maker in makers if maker.opcode != "parameter"}
            elif not any(maker.opcode == "parameter" for maker in makers):
                own += self._computation.by_id[part].shape.bytes
        return own, given

    def _inside(self, instruction: Instruction) -> int:
        """Bytes that the computations called by an instruction need in addition to its operands and result."""
        if instruction.opcode not in _CALLS:
            return 0
        called = [self._module.by_id[number] for number in instruction.called if number in self._module.by_id]
        return max((_Walk(self._module, c, is_entry=False).result().peak for c in called), default=0)
