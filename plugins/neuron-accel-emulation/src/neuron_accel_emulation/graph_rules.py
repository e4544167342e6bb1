# SPDX-License-Identifier: Apache-2.0
"""Rules by which the Neuron compiler or runtime rejects a graph, checked without them.

The rules are from the compiler's public list of error codes (compiler/error-codes of the Neuron SDK's documentation,
release 2.33), as far as they can be checked on a graph, and the limits of an instance (:class:`Hardware`). A graph
without findings may still fail to compile: how many instructions it becomes (NCC_EXSP001, NCC_EBVF030, NCC_EVRF007,
NCC_EXTP004) only the compiler knows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

from neuron_accel_emulation.hlo import RNG_ALGORITHMS, Computation, Instruction, Module, Shape
from neuron_accel_emulation.hlo_memory import live_bytes

Level = Literal["error", "warning"]
COLLECTIVES = frozenset({"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"})
_INTEGERS = frozenset({"s32", "u32", "s64", "u64"})
_LARGE_CONSTANT = 1 << 16
_KNOWN_CALLS = frozenset(
    {
        *("AwsNeuronErf", "AwsNeuronGelu", "AwsNeuronGeluApprxTanh", "AwsNeuronGeluBackward", "AwsNeuronSilu"),
        *("AwsNeuronSiluBackward", "AwsNeuronRmsNorm", "AwsNeuronSoftmax", "AwsNeuronSoftmaxBackward"),
        *("AwsNeuronCollectiveMatmul", "AwsNeuronIntMatmult", "AwsNeuronArgMax", "AwsNeuronArgMin", "AwsNeuronTopK"),
        *("AwsNeuronDropoutMaskV1", "AwsNeuronCustomNativeKernel", "AwsNeuronCustomOp", "AwsNeuronDevicePrint"),
        *("ResizeNearest", "ResizeBilinear", "ResizeNearestGrad", "AwsNeuronLNCShardingConstraint"),
        *("AwsNeuronTransferWithStaticRing", "AwsNeuronModuleMarkerStart-Forward"),
        *("AwsNeuronModuleMarkerStart-Backward", "AwsNeuronModuleMarkerEnd-Forward"),
        *("AwsNeuronModuleMarkerEnd-Backward", "NeuronBoundaryMarker-Start", "NeuronBoundaryMarker-End"),
    }
)
_QUANTIZE, _SCALED = "QuantizeMX", "__op$block_scaled_dot"
_NO_FLOAT8 = "f8e4m3fn does not exist on Trn1 and Trn2"
_NO_FLOAT64 = "no code is generated for f64"
_ROUNDED = "float64 becomes float32 on Neuron devices, with less precision"
_NO_SUCH_FLOATS = frozenset({"f8e4m3fnuz", "f8e4m3b11fnuz", "f8e5m2fnuz"})
_NO_SUCH_TYPES = frozenset({"f64", "s1", "s2", "s4", "u1", "u2", "u4", "f4e2m1fn", "f8e8m0fnu", "f8e3m4"})


class Hardware(Protocol):
    """Limits of a machine, as :meth:`neuron_accel.Instance.hardware` returns them."""

    @property
    def name(self) -> str: ...

    @property
    def partitions(self) -> int | None: ...

    def groups_problem(self, groups: Sequence[Sequence[int]]) -> str | None: ...

    def ring_problem(self, pairs: Sequence[tuple[int, int]]) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem in a graph.

    Args:
        level: ``error`` if the graph does not compile, does not run or computes wrong results; ``warning`` if it is
            slower than necessary.
        code: an error code of the compiler (``NCC_EVRF061``), or one of groups, ring, partitions, ranks, constant,
            recompile, host-read, float64.
        what: description, as a sentence.
        fix: how to fix it.
        op: name of the first instruction with the problem; empty for one of the full graph.
        source: ``file:line`` of the code that the instruction is from; empty if it is not known.
        count: number of instructions with the problem.
        graph: number of the graph.
        ranks: the ranks that execute the graph.
    """

    level: Level
    code: str
    what: str
    fix: str
    op: str = ""
    source: str = ""
    count: int = 1
    graph: str = ""
    ranks: tuple[int, ...] = ()


# ---- Rules for one instruction: (module, computation, instruction) -> findings ---------------------------------------
Rule: TypeAlias = Callable[[Module, Computation, Instruction], Iterator[Finding]]


def _types(module: Module, computation: Computation, one: Instruction) -> Iterator[Finding]:
    dtypes = {array.dtype for array in one.shape.arrays}
    if dtypes & {"c64", "c128"}:
        yield _error("NCC_EVRF004", "complex numbers are not supported", "compute with real and imaginary parts", one)
    if dtypes & _NO_SUCH_FLOATS:
        fix = "use bfloat16 or float16"
        yield _error("NCC_EVRF005", f"{_first(dtypes & _NO_SUCH_FLOATS)} is not supported", fix, one)
    if "f8e4m3fn" in dtypes:
        yield _error("NCC_ESPP047", _NO_FLOAT8, "use bfloat16, or Trn3", one)
    if dtypes & _NO_SUCH_TYPES:
        name = _first(dtypes & _NO_SUCH_TYPES)
        fix = (
            "convert to float32: Python floats and numpy arrays often are float64" if name == "f64" else "use bfloat16"
        )
        yield _error("NCC_ESPP004", _NO_FLOAT64 if name == "f64" else f"no code is generated for {name}", fix, one)


def _dynamic(module: Module, computation: Computation, one: Instruction) -> Iterator[Finding]:
    if one.shape.is_dynamic:
        fix = "avoid nonzero, unique, masked_select and boolean indexing: use torch.where, or pad to a fixed size"
        yield _error("NCC_EMOD025", f"the shape of {one.opcode} depends on values", fix, one)


def _reductions(module: Module, computation: Computation, one: Instruction) -> Iterator[Finding]:
    code = {"all-reduce": "NCC_EVRF061", "reduce-scatter": "NCC_EVRF063"}.get(one.opcode)
    integer = _INTEGERS & _read(computation, one)
    if code and integer:
        what = f"{one.opcode} of {_first(integer)} is computed in float32, exact to 2**24 only; an error after SDK 2.32"
        yield _error(
            code, what, "use the collectives of accelerator or backend, which are exact, or reduce floats", one
        )


def _products(module: Module, computation: Computation, one: Instruction) -> Iterator[Finding]:
    integer = _INTEGERS & _read(computation, one)
    if one.opcode == "dot" and integer:
        what = f"a matrix product of {_first(integer)} has no integer datapath (s64 anywhere, s32 on Trn2 and later)"
        yield _error("NCC_EVRF035", what, "convert the operands to float32", one)
    if one.opcode == "power" and integer & {"s64", "u64"}:
        yield _error("NCC_EVRF062", "a power of s64 is computed in s32", "convert to float32, or multiply", one)
    if one.opcode == "shift-right-arithmetic" and not _read(computation, one) & {"s32", "u32"}:
        yield _error("NCC_EVRF022", "only 32-bit integers are shifted right", "convert to int32", one)


def _scatters(module: Module, computation: Computation, one: Instruction) -> Iterator[Finding]:
    if one.opcode != "scatter" or not one.operands:
        return
    target = computation.by_id[one.operands[0]].shape
    integer = [a.dtype for a in target.arrays if a.dtype in _INTEGERS | {"pred", "s8", "u8", "s16", "u16"}]
    if integer and module.reduces_by(one) not in ("", "parameter"):  # a scatter that overwrites is supported
        code = "NCC_EVRF060" if integer[0] in _INTEGERS else "NCC_EVRF016"
        what = f"a scatter that adds up {integer[0]} is computed in float32"
        yield _error(code, what, "scatter floats (index_add, scatter_add, bincount), and convert the result", one)


def _indices(module: Module, computation: Computation, one: Instruction) -> Iterator[Finding]:
    if one.opcode not in ("gather", "scatter") or len(one.operands) < 2 or len(one.index_dims) != 1:
        return
    operand, indices = computation.by_id[one.operands[0]], computation.by_id[one.operands[1]]
    while indices.opcode in ("reshape", "bitcast", "convert", "copy"):
        indices = computation.by_id[indices.operands[0]]
    rows = operand.shape.arrays[0].dims[one.index_dims[0]]
    if indices.opcode == "iota" and max(indices.shape.dims, default=0) > rows:
        code = "NCC_EVRF056" if one.opcode == "gather" else "NCC_EVRF031"
        what = f"{one.opcode} counts to {max(indices.shape.dims)} in a table of {rows} rows"
        yield _error(code, what, "check max_position_embeddings: sequences are longer than the table of positions", one)


def _operators(module: Module, computation: Computation, one: Instruction) -> Iterator[Finding]:
    if one.opcode == "triangular-solve":
        fix = "compute an inverse and a product, or compute it on the host"
        yield _error("NCC_EVRF001", "triangular-solve is not supported", fix, one)
    if one.opcode in ("sort", "cholesky", "fft"):
        fix = "use topk instead of sort, or compute it on the host, outside of the step"
        what = f"{one.opcode} is not among the operators that are documented as supported"
        yield _warning("NCC_EVRF001", what, fix, one)
    if one.opcode in ("topk", "custom-call") and one.target in ("", "TopK", "AwsNeuronTopK"):
        integer = _INTEGERS & _read(computation, one)
        if integer:
            yield _error("NCC_EVRF013", f"topk of {_first(integer)} is not supported", "convert to float32", one)
    elif one.opcode == "custom-call" and one.target not in {*_KNOWN_CALLS, _QUANTIZE, _SCALED}:
        fix = "leave out the operation that it is from; custom calls must be kernels of the Neuron packages"
        yield _error("NCC_EHCA005", f"custom call {one.target!r} is not supported", fix, one)
    if one.opcode == "rng-bit-generator" and one.algorithm != 0:
        name = RNG_ALGORITHMS.get(one.algorithm, str(one.algorithm))
        yield _error("NCC_EVRF006", f"random numbers by {name}", "use torch's own random functions", one)


def _kernels(module: Module, computation: Computation, one: Instruction) -> Iterator[Finding]:
    if one.target == "AwsNeuronCustomNativeKernel" and "neuronxcc.nki" in one.config:
        what = "a kernel of neuronxcc.nki, which SDK 2.30 and later refuse"
        yield _error("NCC_EVRF065", what, "use kernels of the packages nki and nkilib, or none", one)


def _microscaling(module: Module, computation: Computation, one: Instruction) -> Iterator[Finding]:
    """Quantized blocks and their product (Trn3)."""
    if one.opcode != "custom-call" or one.target not in (_QUANTIZE, _SCALED):
        return
    given, results = [each.shape for each in computation.operands(one)], one.shape.arrays
    config = _json(one.config)
    broken = _quantize_problems if one.target == _QUANTIZE else _scaled_problems
    for code, what in broken(given, results, one.shape.dtype == "tuple", config):
        yield _error(f"NCC_EVRF{code:03}", f"{one.target}: {what}", "call it as its documentation says", one)


def _quantize_problems(
    given: Sequence[Shape], results: Sequence[Shape], is_tuple: bool, config: dict[str, Any] | None
) -> Iterator[tuple[int, str]]:
    if config is None:
        yield 36, "its configuration is not JSON"
        return
    if len(given) != 1:
        yield 37, f"{len(given)} operands instead of one"
        return
    (tensor,) = given
    rank, dim = len(tensor.dims), int(config.get("dim", 0))
    last = dim + rank if dim < 0 else dim
    if not max(0, rank - 2) <= last < rank:
        yield 38, f"dim {dim} is not one of the last two"
    elif tensor.dims[last] % 4:
        yield 58, f"dim {dim} has {tensor.dims[last]} elements, which is not a multiple of 4"
    if config.get("block_size", 32) != 32:
        yield 39, f"blocks of {config['block_size']} instead of 32"
    if config.get("scale_method", "EMAX") != "EMAX":
        yield 40, f"scale_method {config['scale_method']!r} instead of 'EMAX'"
    if tensor.dtype not in ("bf16", "f16"):
        yield 41, f"quantizes {tensor.dtype} instead of bf16 or f16"
    if not is_tuple or len(results) != 2:
        yield 57, "its result is not a pair of data and scale"
    elif results[0].dtype != "u32" or config.get("dtype") not in ("float8_e5m2", "float8_e4m3fn"):
        yield 42, "its data are not packed float8_e5m2 or float8_e4m3fn in u32"


def _scaled_problems(
    given: Sequence[Shape], results: Sequence[Shape], is_tuple: bool, config: dict[str, Any] | None
) -> Iterator[tuple[int, str]]:
    if config is None:
        yield 49, "its configuration is not JSON"
        return
    if len(given) != 4:
        yield 43, f"{len(given)} operands instead of two matrices and their scales"
        return
    left, right = given[:2]
    if left.dtype != "u32":
        yield 44, f"its left matrix is {left.dtype} instead of u32, in which QuantizeMX packs"
    if results[0].dtype not in ("f32", "bf16"):
        yield 45, f"its result is {results[0].dtype} instead of f32 or bf16"
    ranks = len(left.dims), len(right.dims)
    for code, rank in zip((46, 47), ranks, strict=True):
        if rank < 2:
            yield code, f"a matrix has {rank} dims"
    if min(ranks) < 2:
        return
    more = config.get("scaled_dot_backend_config", {})
    batch = [more.get(f"{side}_batch_dimensions", []) for side in ("lhs", "rhs")]
    dims = [
        next(iter(more.get(f"{side}_contracting_dimensions", [])), rank - 1)
        for side, rank in zip(("lhs", "rhs"), ranks, strict=True)
    ]
    if any(dim in others for dim, others in zip(dims, batch, strict=True)):
        yield 53, "a contracting dim is also a batch dim"
    elif any(not 0 <= each < rank for others, rank in zip(batch, ranks, strict=True) for each in others):
        yield 54, "a batch dim is out of bounds"
    elif any(not 0 <= dim < rank for dim, rank in zip(dims, ranks, strict=True)):
        yield 55, "a contracting dim is out of bounds"
    elif left.dims[dims[0]] != right.dims[dims[1]]:
        yield 50, f"contracting dims of {left.dims[dims[0]]} and {right.dims[dims[1]]} elements"
    elif [left.dims[each] for each in batch[0]] != [right.dims[each] for each in batch[1]]:
        yield 48, "batch dims differ"


def _json(text: str) -> dict[str, Any] | None:
    """A configuration; None if it is not an object of JSON."""
    try:
        found = {} if text in ("", "None") else json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _windows(module: Module, computation: Computation, one: Instruction) -> Iterator[Finding]:
    strides, dilations, bases = (tuple(w[i] for w in one.window) for i in range(3))
    fix = "use dilation 1, or separate operations for up-sampling and down-sampling"
    if one.opcode == "convolution" and max(bases, default=1) > 1:
        if max(dilations) > 1:
            yield _error("NCC_EVRF010", "a convolution dilates its input and its kernel", fix, one)
        if max(strides) > 1:
            yield _error("NCC_EVRF011", "a convolution dilates its input and strides", fix, one)
    if one.opcode == "reduce-window":
        if max(bases, default=1) > 1:
            yield _error("NCC_EVRF017", "a pooling dilates its input", fix, one)
        if max(dilations, default=1) > 1:
            yield _error("NCC_EVRF018", "a pooling dilates its window", fix, one)
        if len(one.operands) != 2:
            yield _error("NCC_EVRF019", "a pooling of several tensors", "pool one tensor at a time", one)


def _constants(module: Module, computation: Computation, one: Instruction) -> Iterator[Finding]:
    if one.opcode != "constant":
        return
    if one.shape.dtype == "u64" and one.literal.isdecimal() and int(one.literal) >= 1 << 32:
        what = "an unsigned 64-bit constant does not fit into 32 bits"
        yield _error("NCC_ESFH002", what, "use smaller constants, or uint32", one)
    if one.literal_bytes >= _LARGE_CONSTANT:
        what = f"a constant of {one.literal_bytes:,} bytes is part of the graph and of its hash"
        yield _warning("constant", what, "make it a buffer, which is moved to the device before the step", one)


RULES: tuple[Rule, ...] = (
    *(
        _types,
        _dynamic,
        _reductions,
        _products,
        _scatters,
        _indices,
        _operators,
        _kernels,
        _microscaling,
        _windows,
        _constants,
    ),
)


def check_module(
    module: Module,
    *,
    hardware: Hardware | None = None,
    core_bytes: int | None = None,
    world_size: int | None = None,
    for_neuron: bool = True,
) -> list[Finding]:
    """Checks a graph; equal findings about several instructions are merged, with their number.

    Args:
        module: the graph, before optimization.
        hardware: limits of groups and rings; None: not checked.
        core_bytes: device memory of one rank, in bytes; None: not checked.
        world_size: number of ranks; needed for collectives without groups.
        for_neuron: whether torch_xla traced the graph for a Neuron device, for which it converts float64 to float32. In
            a graph for another device float64 is not an error, and a warning only for inputs that are tensors.
    """
    found: dict[tuple[str, str, str], Finding] = {}
    for computation, instruction in module.instructions:
        for rule in RULES:
            for finding in rule(module, computation, instruction):
                if not for_neuron and finding.what == _NO_FLOAT64:
                    if instruction.opcode != "parameter" or not instruction.shape.dims:
                        continue
                    finding = replace(finding, level="warning", code="float64", what=_ROUNDED)
                if finding.what == _NO_FLOAT8 and hardware is not None:
                    if hardware.name.startswith("trn3"):
                        continue
                    finding = replace(finding, code="NCC_EVRF051")
                key = (finding.code, finding.what, finding.source)
                first = found.get(key)
                found[key] = replace(first, count=first.count + 1) if first else finding
    findings = list(found.values())
    if hardware is not None:
        findings += _hardware_findings(module, hardware, world_size)
    if core_bytes is not None:
        findings += _memory_findings(module, core_bytes)
    return findings


# ---- Rules for a graph on an instance --------------------------------------------------------------------------------
def partitions(module: Module, world_size: int | None = None) -> dict[tuple[tuple[int, ...], ...], Instruction]:
    """The partitions of the ranks into groups or rings in a graph, with the first collective that uses each."""
    ways: dict[tuple[tuple[int, ...], ...], Instruction] = {}
    everyone = ((*range(world_size),),) if world_size else ()
    for _, one in module.instructions:
        if one.opcode in COLLECTIVES:
            way = _rings(one.pairs) if one.opcode == "collective-permute" else one.replica_groups or everyone
            ways.setdefault(way, one)
    return ways


def _rings(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """The connected components of ranks under (source, target) pairs."""
    group_of: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = group_of.get(source, {source}) | group_of.get(target, {target})
        group_of.update(dict.fromkeys(joined, joined))
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


def _hardware_findings(module: Module, hardware: Hardware, world_size: int | None) -> Iterator[Finding]:
    ways = partitions(module, world_size)
    for way, one in ways.items():
        if one.opcode == "collective-permute":
            problem = hardware.ring_problem(one.pairs)
            if problem:
                fix = "use backend.permute, which gathers where an instance has no ring, or groups of neighbours"
                yield _error("ring", f"a permutation that {hardware.name} cannot form: {problem}", fix, one)
        else:
            problem = hardware.groups_problem(way)
            if problem:
                fix = "choose degrees by which such groups are formed (docs/compilation.md, planning for an instance)"
                yield _error("groups", f"groups that {hardware.name} cannot form: {problem}", fix, one)
    if hardware.partitions is not None and len(ways) > hardware.partitions:
        what = (
            f"the ranks are partitioned into groups in {len(ways)} ways; {hardware.name} supports {hardware.partitions}"
        )
        yield Finding(level="error", code="partitions", what=what, fix="leave out plugins that add groups")


def _memory_findings(module: Module, core_bytes: int) -> Iterator[Finding]:
    need = live_bytes(module)
    if need.peak <= 0.9 * core_bytes:
        return
    level: Level = "error" if need.peak > core_bytes else "warning"
    of = f"{need.peak / 2**30:.2f} GiB are live at once, and a core has {core_bytes / 2**30:.0f} GiB"
    largest = "; ".join(f"{i.name} {i.shape}" for i, _ in need.largest[:2])
    what = f"{of} ({need.inputs / 2**30:.2f} GiB of inputs; then {largest})"
    fix = "checkpoint activations, raise the tensor-parallel degree, use ZeRO-1, or a smaller batch"
    yield replace(_finding(level, "NCC_EOOM001", what, fix, need.at))


# ---- Findings --------------------------------------------------------------------------------------------------------
def _read(computation: Computation, one: Instruction) -> set[str]:
    """The dtypes of the operands of an instruction."""
    return {array.dtype for operand in computation.operands(one) for array in operand.shape.arrays}


def _first(names: set[str] | frozenset[str]) -> str:
    return min(names)


def _error(code: str, what: str, fix: str, one: Instruction) -> Finding:
    return _finding("error", code, what, fix, one)


def _warning(code: str, what: str, fix: str, one: Instruction) -> Finding:
    return _finding("warning", code, what, fix, one)


def _finding(level: Level, code: str, what: str, fix: str, one: Instruction) -> Finding:
    return Finding(level=level, code=code, what=what, fix=fix, op=one.name, source=source_of(one))


def source_of(one: Instruction) -> str:
    """``file:line`` of the innermost frame outside of torch, this package and installed ones, if there is one."""
    places = one.frames or ((one.source,) if one.source else ())
    own = [
        p
        for p in places
        if not any(f"/{part}/" in p for part in ("torch", "torch_xla", "neuron_accel", "neuron_accel_emulation"))
    ]
    return next((p for p in own if "/site-packages/" not in p and "/lib/python" not in p), (own or [*places, ""])[0])
