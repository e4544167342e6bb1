# SPDX-License-Identifier: Apache-2.0
"""Reads graphs before compilation: serialized ``HloModuleProto`` messages, as torch_xla and XLA's dumps write them.

The messages are decoded without the protobuf package, since the classes generated from XLA's protos are not available
without an XLA runtime, and few of their fields are needed. The numbers of fields are from ``xla/service/hlo.proto`` and
``xla/xla_data.proto``, and do not change; unknown fields are skipped, as in protobuf.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from neuron_accel.errors import UsageError

_NUMBERED = (
    "invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128 f8e5m2 f8e4m3fn s4 u4 "
    "f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1 f4e2m1fn f8e8m0fnu"
)
_TYPES = _NUMBERED.split()
_BYTES = {
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    **dict.fromkeys(("tuple", "opaque", "token"), 0),
    "c128": 16,
}
RNG_ALGORITHMS = {0: "RNG_DEFAULT", 1: "RNG_THREE_FRY", 2: "RNG_PHILOX"}
_LITERAL_FORMATS = {4: "i", 5: "q", 6: "I", 7: "Q", 8: "f", 9: "d"}
_NAMES_AND_EDGES = frozenset({1, 2, 3, 7, 8, 35, 36, 37, 38})
"""Fields of an instruction that are compared separately, or depend on the numbering of the parts of a module."""
_MOST_LITERAL = 64
"""Largest constant, in bytes, whose value is kept; for larger ones a checksum is."""


# ---- Modules, computations, instructions and shapes ------------------------------------------------------------------
@dataclass(frozen=True)
class Shape:
    """The shape and dtype of an array, or a tuple of shapes.

    Args:
        dtype: XLA's name: ``f32``, ``bf16``, ``s64``, ``pred``; ``tuple`` for a tuple.
        dims: sizes of the dims; upper bounds for dynamic ones.
        is_dynamic: whether a dim has a dynamic size.
        elements: the shapes in a tuple.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    is_dynamic: bool = False
    elements: tuple[Shape, ...] = ()

    @cached_property
    def arrays(self) -> tuple[Shape, ...]:
        """All arrays: the shape itself, or those in a tuple at any depth."""
        if self.dtype != "tuple":
            return (self,)
        return tuple(array for element in self.elements for array in element.arrays)

    @property
    def bytes(self) -> int:
        """Size in bytes, without padding."""
        if self.dtype == "tuple":
            return sum(element.bytes for element in self.elements)
        return math.prod(self.dims) * _BYTES.get(self.dtype, 1)

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction.

    Args:
        name: its name, unique in its module, such as ``all-reduce.7``.
        opcode: XLA's name of the operation.
        shape: shape of its result.
        id: its number, unique in its module.
        operands: ids of the operands.
        called: ids of the computations that it calls.
        replica_groups: groups of a collective; empty if it has none, or all ranks are one group.
        pairs: (source, target) pairs of a collective-permute.
        target: name of a custom call.
        config: configuration of a custom call as text, decoded if it is base64.
        parameter: number of a parameter.
        index: index of a get-tuple-element.
        literal: value of a constant as text; for larger ones a checksum.
        literal_bytes: size of a constant in bytes.
        algorithm: number of the algorithm of a random number generator.
        index_dims: dims of the operand that the indices of a gather or scatter refer to.
        window: (stride, window dilation, base dilation) of each dim of a convolution or reduce-window.
        attributes: a checksum of all fields besides operands, shape and names.
        op_name: the framework's name, such as ``aten__mul``.
        source: ``file:line`` of the code that it is from; empty if it was not recorded.
        frames: ``file:line`` of the stack frames of this code, innermost first.
    """

    name: str
    opcode: str
    shape: Shape
    id: int
    operands: tuple[int, ...] = ()
    called: tuple[int, ...] = ()
    replica_groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    target: str = ""
    config: str = ""
    parameter: int | None = None
    index: int = 0
    literal: str = ""
    literal_bytes: int = 0
    algorithm: int = 0
    index_dims: tuple[int, ...] = ()
    window: tuple[tuple[int, int, int], ...] = ()
    attributes: str = ""
    op_name: str = ""
    source: str = ""
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class Computation:
    """A sequence of instructions, in topological order.

    Args:
        name: its name.
        id: its number.
        instructions: the instructions.
        root: id of the instruction whose result is that of the computation.
    """

    name: str
    id: int
    instructions: tuple[Instruction, ...]
    root: int

    @cached_property
    def by_id(self) -> dict[int, Instruction]:
        return {instruction.id: instruction for instruction in self.instructions}

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.by_id[i] for i in instruction.operands if i in self.by_id]


@dataclass(frozen=True)
class Module:
    """A graph that is compiled as one unit.

    Args:
        name: its name.
        computations: the computations.
        entry_id: id of the entry computation.
        aliases: path of the output that uses the memory of an entry parameter, by the number of the parameter.
        donors: numbers of entry parameters whose memory any result may use.
    """

    name: str
    computations: tuple[Computation, ...]
    entry_id: int
    aliases: dict[int, tuple[int, ...]] = field(default_factory=dict)
    donors: frozenset[int] = frozenset()

    @cached_property
    def entry(self) -> Computation:
        return next(c for c in self.computations if c.id == self.entry_id)

    @cached_property
    def by_id(self) -> dict[int, Computation]:
        return {computation.id: computation for computation in self.computations}

    @property
    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """All instructions, each with its computation."""
        for computation in self.computations:
            for instruction in computation.instructions:
                yield computation, instruction

    def reduces_by(self, instruction: Instruction) -> str:
        """Opcode of the root of the computation that a reduction or collective calls (``add``), or ``""``."""
        for number in instruction.called:
            called = self.by_id.get(number)
            if called is not None and called.root in called.by_id:
                return called.by_id[called.root].opcode
        return ""

    @cached_property
    def form(self) -> tuple[tuple[Any, ...], ...]:
        """The content of the module without the numbering of its parts: modules with equal forms are equal graphs."""
        rows: list[tuple[Any, ...]] = []
        for computation in self.computations:
            place = {instruction.id: index for index, instruction in enumerate(computation.instructions)}
            rows += [
                (
                    *(i.opcode, str(i.shape), tuple(place.get(o, -1) for o in i.operands), i.literal, i.attributes),
                    tuple(self.by_id[c].name.partition(".")[0] for c in i.called if c in self.by_id),
                )
                for i in computation.instructions
            ]
        return tuple(rows)


# ---- Reading ---------------------------------------------------------------------------------------------------------
def read_module(path: Path) -> Module:
    """Reads a module from a file with an ``HloModuleProto``, or an ``HloProto`` that contains one, as in XLA's dumps.

    Raises:
        UsageError: if the file contains neither.
    """
    return parse_module(path.read_bytes(), str(path))


def parse_module(data: bytes, where: str = "HloModuleProto") -> Module:
    """Decodes a module; see :func:`read_module`."""
    try:
        message = _Message(data)
        module = message if message.all(3) else _Message(message.bytes(1))
        return _module(module)
    except (IndexError, ValueError, KeyError, StopIteration, UnicodeDecodeError, struct.error) as error:
        raise UsageError(
            "This is not a serialized HLO module.",
            where=where,
            why=f"it cannot be decoded ({type(error).__name__}: {error})",
            fix="pass a file that torch_xla or XLA has written (--xla_dump_hlo_as_proto)",
        ) from error


def _module(message: _Message) -> Module:
    frames = _Frames(_Message(message.bytes(17)))
    computations = tuple(_computation(_Message(part), frames) for part in message.all(3))
    entry = message.number(6)
    if entry not in {computation.id for computation in computations}:
        raise ValueError(f"no computation {entry}")
    aliases = {}
    for part in _Message(message.bytes(8)).all(1):
        alias = _Message(part)
        aliases[alias.number(2)] = tuple(alias.numbers(1))
    donors = frozenset(_Message(part).number(1) for part in _Message(message.bytes(18)).all(1))
    return Module(message.text(1), computations, entry, aliases, donors)


def _computation(message: _Message, frames: _Frames) -> Computation:
    instructions = tuple(_instruction(_Message(part), frames) for part in message.all(2))
    return Computation(message.text(1), message.number(5), instructions, message.number(6))


def _instruction(message: _Message, frames: _Frames) -> Instruction:
    metadata = _Message(message.bytes(7))
    source, line = metadata.text(3), metadata.number(4)
    opcode = message.text(2)
    literal = message.bytes(8)
    return Instruction(
        name=message.text(1),
        opcode=opcode,
        shape=_shape(_Message(message.bytes(3))),
        id=message.number(35),
        operands=tuple(message.numbers(36)),
        called=tuple(message.numbers(38)),
        replica_groups=_groups(message),
        pairs=tuple((p.number(1), p.number(2)) for p in map(_Message, message.all(52))),
        target=message.text(28),
        config=_config(message.bytes(43)),
        parameter=message.number(9) if opcode == "parameter" else None,
        index=message.number(13),
        literal=_literal(literal) if literal else "",
        literal_bytes=_shape(_Message(_Message(literal).bytes(1))).bytes if literal else 0,
        algorithm=message.number(70),
        index_dims=tuple(_Message(message.bytes(33) or message.bytes(48)).numbers(3)),
        window=tuple(
            (w.number(2), w.number(5), w.number(6)) for w in map(_Message, _Message(message.bytes(15)).all(1))
        ),
        attributes=message.checksum(_NAMES_AND_EDGES),
        op_name=metadata.text(2),
        source=f"{source}:{line}" if source else "",
        frames=frames.of(metadata.number(15)),
    )


def _shape(message: _Message) -> Shape:
    return Shape(
        _TYPES[message.number(2)],
        tuple(message.numbers(3)),
        any(message.numbers(6)) or any(_shape(_Message(part)).is_dynamic for part in message.all(4)),
        tuple(_shape(_Message(part)) for part in message.all(4)),
    )


def _groups(message: _Message) -> tuple[tuple[int, ...], ...]:
    listed = message.all(49)
    if not listed and message.all(87):
        devices = _Message(message.bytes(87))
        listed = devices.all(1)
        if devices.all(2):
            return _iota_groups(_Message(devices.bytes(2)))
    return tuple(tuple(_Message(part).numbers(1)) for part in listed)


def _iota_groups(message: _Message) -> tuple[tuple[int, ...], ...]:
    """Groups as a reshaped and transposed range: number of groups, their size, the dims, and their permutation."""
    count, size = message.number(1), message.number(2)
    dims, order = message.numbers(3) or [count * size], message.numbers(4)
    order = order or list(range(len(dims)))
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    ranges = [range(dims[axis]) for axis in order]
    flat = [
        sum(i * strides[axis] for i, axis in zip(index, order, strict=True)) for index in itertools.product(*ranges)
    ]
    return tuple(tuple(flat[start : start + size]) for start in range(0, count * size, size))


def _config(data: bytes) -> str:
    """The configuration of a custom call, which NKI writes in base64."""
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return data.decode(errors="replace")


def _literal(data: bytes) -> str:
    """A constant as text: its numbers if it is small, else a checksum."""
    message = _Message(data)
    if len(data) <= _MOST_LITERAL:
        for number, code in _LITERAL_FORMATS.items():
            if message.all(number):
                return _listed(message.decoded(number, code))
        if message.all(2):
            return _listed([bool(value) for value in message.numbers(2)])
    return hashlib.sha256(data).hexdigest()[:16]


def _listed(values: list[Any]) -> str:
    return str(values[0]) if len(values) == 1 else str(values)


class _Frames:
    """The table of stack frames of a module."""

    def __init__(self, message: _Message) -> None:
        self._files = [part.decode() for part in message.all(1)]
        self._places = [(_Message(part).number(1), _Message(part).number(3)) for part in message.all(3)]
        self._frames = [(_Message(part).number(1), _Message(part).number(2)) for part in message.all(4)]

    def of(self, number: int) -> tuple[str, ...]:
        """``file:line`` of a frame and of its callers, innermost first."""
        found: list[str] = []
        while 0 < number <= len(self._frames) and len(found) < 64:
            place, number = self._frames[number - 1]
            file, line = self._places[place - 1]
            found.append(f"{self._files[file - 1]}:{line}")
        return tuple(found)


# ---- Protocol buffers ------------------------------------------------------------------------------------------------
class _Message:
    """The undecoded fields of one message."""

    def __init__(self, data: bytes) -> None:
        self._fields: dict[int, list[Any]] = {}
        position, end = 0, len(data)
        while position < end:
            key, position = _varint(data, position)
            number, wire = key >> 3, key & 7
            value: Any
            if wire == 0:
                value, position = _varint(data, position)
            elif wire in (1, 2, 5):
                size = 8 if wire == 1 else 4
                if wire == 2:
                    size, position = _varint(data, position)
                if position + size > end:
                    raise ValueError("the data ends in the middle of a field")
                value, position = data[position : position + size], position + size
            else:
                raise ValueError(f"unknown wire type {wire}")
            self._fields.setdefault(number, []).append(value)

    def all(self, number: int) -> list[Any]:
        return self._fields.get(number, [])

    def bytes(self, number: int) -> bytes:
        values = self.all(number)
        return values[-1] if values else b""

    def text(self, number: int) -> str:
        return self.bytes(number).decode()

    def checksum(self, without: frozenset[int]) -> str:
        """A checksum of all fields except some; empty if there are no others."""
        rest = sorted((number, values) for number, values in self._fields.items() if number not in without)
        return hashlib.sha256(repr(rest).encode()).hexdigest()[:16] if rest else ""

    def number(self, number: int) -> int:
        values = self.all(number)
        return _signed(values[-1]) if values else 0

    def numbers(self, number: int) -> list[int]:
        """The integers of a repeated field, packed or not."""
        found: list[int] = []
        for value in self.all(number):
            if isinstance(value, int):
                found.append(_signed(value))
                continue
            position = 0
            while position < len(value):
                item, position = _varint(value, position)
                found.append(_signed(item))
        return found

    def decoded(self, number: int, code: str) -> list[Any]:
        """The numbers of a repeated field: varints or packed floats, with ``code`` as in :mod:`struct`."""
        if code not in "fd":
            bits = 64 if code in "qQ" else 32
            wrap: Callable[[int], int] = (lambda value: value) if code in "qi" else (lambda value: value % (1 << bits))
            return [wrap(value) for value in self.numbers(number)]
        data = b"".join(self.all(number))
        return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return result, position
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _signed(value: int) -> int:
    """Decodes the 64-bit two's complement of negative numbers in protocol buffers."""
    return value - (1 << 64) if value >= 1 << 63 else value
