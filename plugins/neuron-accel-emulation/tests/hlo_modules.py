"""Small HLO modules for tests, as objects and as serialized bytes."""

from __future__ import annotations

from neuron_accel_emulation.hlo import Computation, Instruction, Module, Shape

TYPES = {"pred": 1, "s16": 3, "s32": 4, "s64": 5, "u64": 9, "f32": 11, "f64": 12, "tuple": 13, "c64": 15, "bf16": 16}


def shape(text):
    """``f32[2,3]``; ``(f32[2], s32[])``."""
    if text.startswith("("):
        return Shape("tuple", elements=tuple(shape(part) for part in text[1:-1].split("; ")))
    dtype, _, dims = text.rstrip("]").partition("[")
    return Shape(dtype, tuple(int(d) for d in dims.split(",") if d))


def module(*rows, called=(), aliases=None, donors=()):
    """Of rows ``(name, opcode, shape, operand names)``, optionally with a dict of more; the last one is the root."""
    computations = [*called, computation("main", rows, 1000)]
    return Module("module", tuple(computations), 1000, aliases or {}, frozenset(donors))


def computation(name, rows, number):
    ids = {row[0]: number + index for index, row in enumerate(rows)}
    made = []
    parameters = 0
    for row in rows:
        key, opcode, text, operands = row[:4]
        more = dict(row[4]) if len(row) > 4 else {}
        if opcode == "parameter":
            more.setdefault("parameter", parameters)
            parameters += 1
        if opcode == "constant":
            more.setdefault("literal_bytes", shape(text).bytes)
        made.append(
            Instruction(
                name=key,
                opcode=opcode,
                shape=shape(text),
                id=ids[key],
                operands=tuple(ids[name] for name in operands.split()),
                **more,
            )
        )
    return Computation(name, number, tuple(made), made[-1].id)


ADD = computation(
    "add", [("a", "parameter", "s64[]", ""), ("b", "parameter", "s64[]", ""), ("c", "add", "s64[]", "a b")], 10
)
SET = computation("set", [("a", "parameter", "s64[]", ""), ("b", "parameter", "s64[]", "")], 20)


# ---- As bytes: protocol buffers, written by hand ---------------------------------------------------------------------
def varint(value):
    value %= 1 << 64
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def packed(number, values):
    return field(number, b"".join(varint(value) for value in values))


def shape_bytes(of):
    if of.dtype == "tuple":
        return field(2, 13) + b"".join(field(4, shape_bytes(element)) for element in of.elements)
    return field(2, TYPES[of.dtype]) + packed(3, of.dims) + (packed(6, [1]) if of.is_dynamic else b"")


def instruction_bytes(one, literal=None, extra=b""):
    data = field(1, one.name) + field(2, one.opcode) + field(3, shape_bytes(one.shape)) + field(35, one.id)
    data += packed(36, one.operands) + packed(38, one.called)
    data += b"".join(field(49, packed(1, group)) for group in one.replica_groups)
    data += b"".join(field(52, field(1, source) + field(2, target)) for source, target in one.pairs)
    if one.source:
        file, line = one.source.rsplit(":", 1)
        data += field(7, field(2, one.op_name) + field(3, file) + field(4, int(line)) + field(15, 1))
    if literal is not None:
        data += field(8, field(1, shape_bytes(one.shape)) + packed(5, [literal]))
    return data + (field(9, one.parameter) if one.parameter is not None else b"") + extra
