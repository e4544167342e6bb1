# SPDX-License-Identifier: Apache-2.0
"""One training step of one rank, counted: memory, traffic and operations; and the same step of a deeper model."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel_plan.memory import (
    ACTIVATIONS,
    BUCKETS,
    GRADIENTS,
    HOST,
    MASTERS,
    PARTS,
    STATE,
    TEMPORARY,
    WEIGHTS,
    Moment,
    Peak,
    StepCounter,
)
from neuron_accel_plan.shapes import Results
from neuron_accel_plan.trace import Trace, Tracer

if TYPE_CHECKING:
    from neuron_accel import NeuronAccelerator
    from neuron_accel.contract import PreparedModel
    from neuron_accel.contract.events import Transfer


KEPT = (GRADIENTS, MASTERS, STATE, BUCKETS)
"""Parts of memory of which later steps have from their beginning what a first step has created and kept."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """All collectives of a step that are alike.

    Args:
        op: name of the collective.
        axis: axis, or axes, of the mesh along which it communicates.
        ranks: number of ranks in the group.
        dtype: dtype of the tensors.
        messages: number of collectives.
        sent: bytes that this rank sends in all of them.
    """

    op: str
    axis: str
    ranks: int
    dtype: str
    messages: int
    sent: int


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """What a rank keeps, sends and computes in one optimizer step.

    Args:
        peaks: the peak of memory of each stretch of the step.
        flows: what is sent.
        operations: floating-point operations of matrix products, convolutions and attention kernels, a multiplication
            and an addition each; those of recomputation included.
        weights: bytes of this rank's parameters and buffers.
        uncounted: names of operations of that kind whose number is not known, such as those of custom kernels.
        noted: operations that a compiler may refuse.
        traces: what the rank does, in order, with a factor for each: 1 for a dry run of a step, or the factors of the
            steps from which it was extrapolated. Empty for a real rank.
        blocks: indices of the model's blocks that this rank has, if they were named.
    """

    peaks: tuple[Peak, ...]
    flows: tuple[Flow, ...]
    operations: int
    weights: int
    uncounted: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()
    traces: tuple[tuple[float, Trace], ...] = field(default=(), repr=False)
    blocks: tuple[int, ...] = ()

    def __repr__(self) -> str:
        sent = sum(flow.sent for flow in self.flows)
        return (
            f"<{type(self).__name__}: peak {self.peak.total:,} bytes, sends {sent:,} bytes, {self.operations:,} "
            "operations>"
        )

    @property
    def peak(self) -> Peak:
        """The largest of the peaks."""
        return max(self.peaks, key=lambda peak: peak.total)


def count_step(
    accelerator: NeuronAccelerator,
    build: Callable[[], nn.Module],
    batch: Callable[[], Mapping[str, torch.Tensor]],
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    max_norm: float | None = 1.0,
    blocks: str | None = None,
    warm_up: bool = True,
    results: Results | None = None,
) -> StepCount:
    """Prepares a model, runs two optimizer steps, and counts the second, since the first creates what stays.

    Args:
        accelerator: of a dry run, or of one of several real ranks on the CPU.
        build: creates the model, which returns an output with a ``loss``; on the meta device for a dry run.
        batch: creates a micro-batch on the device of the accelerator.
        optimizer: creates the optimizer of parameters.
        max_norm: norm to which gradients are clipped; None: not clipped.
        blocks: FQN of the list of the model's blocks, for moments.
        warm_up: False to run one step only, and to add what it creates and keeps (:data:`KEPT`) to its earlier moments:
            faster, and approximate where a second step differs otherwise, such as by a first exchange of shapes.
        results: what operations on tensors without memory return, to be shared by several dry runs.

    Raises:
        NeuronAccelError: the error of ``prepare``, if the layout is not possible.
    """
    counter, backend = StepCounter(accelerator.device, results), accelerator.run.backend
    with counter:
        model = build()
        counter.label([*model.parameters(), *model.buffers()], HOST)
        model, stepper = accelerator.prepare(model, optimizer(model.parameters()))
        kept = [*kept_tensors(accelerator.run.prepared(model)), *model.buffers()]
        counter.label(kept, WEIGHTS)
        counter.name_modules(model, blocks)
        for again in (True, False) if warm_up else (False,):
            counter.forget_peaks()
            before = counter.operations
            with no_collection(), backend.record() as traffic:
                if not backend.has_values and not again:
                    counter.tracer = Tracer(traffic, counter.find, lambda: backend.imitating)
                _train(accelerator, counter, model, stepper, batch, max_norm)
        peaks = counter.peaks()
        if not warm_up:
            kept_from_now = {part: counter.alive()[part] for part in KEPT}
            peaks = [
                Peak(peak.moment, {part: max(size, kept_from_now.get(part, 0)) for part, size in peak.parts.items()})
                for peak in peaks
            ]
        return StepCount(
            peaks=tuple(peaks),
            flows=tuple(flows_of(traffic.transfers)),
            operations=counter.operations - before,
            weights=sum(tensor.nbytes for tensor in kept),
            uncounted=tuple(sorted(counter.uncounted)),
            noted=tuple(sorted(counter.noted)),
            traces=() if counter.tracer is None else ((1.0, counter.tracer.trace()),),
            blocks=() if blocks is None else _own_blocks(model.get_submodule(blocks)),
        )


def kept_tensors(model: PreparedModel | None) -> Iterator[torch.Tensor]:
    """Yields what this rank keeps of the parameters: where their values are gathered for use, its elements."""
    for record in model.parameters if model is not None else ():
        if record.weights is not None:
            yield record.weights.tensor
        elif record.current is not None:
            yield record.current


def waiting_gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the gradients that wait for the last micro-batch. Those that are reduced are read elsewhere: they are what
    the optimizer updates with."""
    for parameter in model.parameters():
        if type(parameter.grad) is torch.Tensor:
            yield parameter.grad


def _own_blocks(container: nn.Module) -> tuple[int, ...]:
    """Indices of blocks with parameters: the others are those of other ranks."""
    return tuple(int(name) for name, block in container.named_children() if any(True for _ in block.parameters()))


@contextmanager
def no_collection() -> Iterator[None]:
    """A context in which cycles of references are not collected, at moments that would differ from run to run."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _train(
    accelerator: NeuronAccelerator,
    counter: StepCounter,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], Mapping[str, torch.Tensor]],
    max_norm: float | None,
) -> None:
    """One optimizer step, of as many micro-batches as the accelerator accumulates."""
    for _ in range(accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(model):
            with counter.during("forward"):
                loss = model(**batch()).loss
            with counter.during("backward"):
                accelerator.backward(loss)
                del loss
                counter.label(waiting_gradients(model), GRADIENTS)
            if accelerator.sync_gradients and max_norm is not None:
                with counter.during("clipping"):
                    accelerator.clip_grad_norm_(model.parameters(), max_norm)
            with counter.during("optimizer step"):
                optimizer.step()
                optimizer.zero_grad()


def flows_of(transfers: Iterable[Transfer]) -> list[Flow]:
    """Returns the transfers, those that are alike together."""
    messages: Counter[tuple[str, str, int, str]] = Counter()
    sent: Counter[tuple[str, str, int, str]] = Counter()
    for transfer in transfers:
        kind = (transfer.op, transfer.group, transfer.size, str(transfer.dtype).removeprefix("torch."))
        messages[kind] += 1
        sent[kind] += transfer.sent
    return [
        Flow(op=op, axis=axis, ranks=ranks, dtype=dtype, messages=count, sent=sent[op, axis, ranks, dtype])
        for (op, axis, ranks, dtype), count in messages.items()
    ]


# ---- A deeper model from two shallow ones ----------------------------------------------------------------------------
DEPTHS = (2, 3)
"""Numbers of blocks that are run, from which the step of any number of equal blocks is extrapolated. With two there are
a first and a last one; every count is then a constant and a multiple of the depth. Memory at the first and at the last
block, before and after the blocks is followed separately in each phase: between the first and the last it changes
evenly, so that the peak is at one of the two. For estimates one and two blocks are enough."""


def depths_of(period: int, depth: int, gathered: bool = False, least: int = DEPTHS[0]) -> tuple[int, int]:
    """Returns the numbers of blocks that are run of a model with ``depth`` blocks whose kinds take turns, such as
    attention in a window and to all tokens: at least one of each and ``least`` in all, ending as the model does, and
    one more of each. Memory is followed at the last of each kind. Where weights are gathered for use (``gathered``),
    none of these is the first block: there are none before that whose weights are gathered beside its own."""
    few = max(least, period + gathered)
    few += (depth - few) % period
    return few, few + period


def extrapolate(
    counts: Sequence[StepCount], depth: float, blocks: str, last: int, depths: tuple[int, int] = DEPTHS
) -> StepCount:
    """Returns the count of a rank with more blocks.

    Args:
        counts: of the same model with each number of blocks in ``depths``, in each stage of the rank.
        depth: number of blocks in each stage of the rank; their mean, if they differ.
        blocks: FQN of the list of blocks.
        last: index of the rank's last block, for moments.
        depths: see :func:`depths_of`.
    """
    few, more = counts
    period = depths[1] - depths[0]
    steps = (depth - depths[0]) / period

    def at(first: int, second: int) -> int:
        return first + round((second - first) * steps)

    places = [_by_place(count, blocks, period) for count in counts]
    common = [place for place in places[0] if place in places[1]]
    # What a further block keeps. A peak that grows by more is at two moments of its place, one for each count.
    kept, grown = (max((found[place].parts[ACTIVATIONS] for place in common), default=0) for found in places)
    peaks = []
    for place in common:
        first, second = (found[place] for found in places)
        least = second.parts if depth >= depths[1] else dict.fromkeys(PARTS, 0)
        parts = {part: max(least[part], at(first.parts[part], second.parts[part])) for part in PARTS}
        if second.parts[ACTIVATIONS] - first.parts[ACTIVATIONS] > grown - kept >= 0:
            parts[ACTIVATIONS] = max(
                least[ACTIVATIONS], at(second.parts[ACTIVATIONS] - grown + kept, second.parts[ACTIVATIONS])
            )
        if few.blocks == (0,) and place[3] is not None:  # the first block is the last, whose input is temporary
            parts[TEMPORARY] = second.parts[TEMPORARY]
        peaks.append(Peak(_moved(second.moment, None if place[3] is None else last - place[3], blocks), parts))
    flows = [{_kind(flow): flow for flow in count.flows} for count in counts]
    return StepCount(
        peaks=tuple(peaks),
        flows=tuple(
            Flow(
                op=flow.op,
                axis=flow.axis,
                ranks=flow.ranks,
                dtype=flow.dtype,
                messages=at(flows[0][kind].messages if kind in flows[0] else 0, flow.messages),
                sent=at(flows[0][kind].sent if kind in flows[0] else 0, flow.sent),
            )
            for kind, flow in flows[1].items()
        ),
        operations=at(few.operations, more.operations),
        weights=at(few.weights, more.weights),
        uncounted=more.uncounted,
        noted=more.noted,
        traces=tuple(
            (factor * weight, trace)
            for factor, count in zip((1 - steps, steps), counts, strict=True)
            for weight, trace in count.traces
        ),
    )


def at_blocks(count: StepCount, blocks: str, indices: Sequence[int]) -> StepCount:
    """Returns the count of a rank whose blocks have these indices in the model.

    Args:
        count: of a model whose blocks of other ranks are fewer.
        blocks: FQN of the list of blocks.
        indices: those of the rank's blocks.
    """
    moved = dict(zip(count.blocks, indices, strict=True))

    def peak_at(peak: Peak) -> Peak:
        index = block_of(peak.moment, blocks)
        return Peak(_moved(peak.moment, None if index is None else moved.get(index, index), blocks), peak.parts)

    return replace(count, peaks=tuple(peak_at(peak) for peak in count.peaks), blocks=tuple(indices))


def repeat(counts: Sequence[StepCount], numbers: Sequence[int], number: int, kept: Sequence[int]) -> StepCount:
    """Returns the count of a step of ``number`` micro-batches.

    Args:
        counts: of the same step with two numbers of micro-batches.
        numbers: these numbers.
        number: the number of micro-batches.
        kept: largest number of micro-batches whose activations are kept at a time, in both counts and in the result.
    """
    few, more = counts
    steps = (number - numbers[0]) / (numbers[1] - numbers[0])
    grows = kept[1] - kept[0]

    def at(first: int, second: int) -> int:
        return first + round((second - first) * steps)

    known = {peak.moment: peak for peak in few.peaks}
    peaks = []
    for peak in more.peaks:
        parts, before = dict(peak.parts), known.get(peak.moment)
        if before is not None and grows > 0:
            each = max(0, peak.parts[ACTIVATIONS] - before.parts[ACTIVATIONS]) / grows
            parts[ACTIVATIONS] = max(0, peak.parts[ACTIVATIONS] + round(each * (kept[2] - kept[1])))
        peaks.append(Peak(peak.moment, parts))
    flows = {_kind(flow): flow for flow in few.flows}
    return replace(
        more,
        peaks=tuple(peaks),
        flows=tuple(
            replace(
                flow,
                messages=at(flows[_kind(flow)].messages if _kind(flow) in flows else 0, flow.messages),
                sent=at(flows[_kind(flow)].sent if _kind(flow) in flows else 0, flow.sent),
            )
            for flow in more.flows
        ),
        operations=at(few.operations, more.operations),
        traces=tuple(
            (factor * weight, trace)
            for factor, count in zip((1 - steps, steps), counts, strict=True)
            for weight, trace in count.traces
        ),
    )


def _kind(flow: Flow) -> tuple[str, str, int, str]:
    return flow.op, flow.axis, flow.ranks, flow.dtype


_Place = tuple[str, int, str, "int | None"]
"""Phase, micro-batch, where in the model, and how many blocks before the last one of a stage, if it is near to that."""


def _by_place(count: StepCount, blocks: str, period: int) -> dict[_Place, Peak]:
    """The largest peak of each phase of each micro-batch before, after, and in the first and the last block, or the
    last of each kind, of each of the rank's stages, which are runs of neighbouring blocks."""
    found: dict[_Place, Peak] = {}
    starts = [index for index in count.blocks if index - 1 not in count.blocks]
    ends = [index for index in count.blocks if index + 1 not in count.blocks]
    for peak in count.peaks:
        index = block_of(peak.moment, blocks)
        places: list[tuple[str, int | None]]
        if index is None:
            places = [("after" if peak.moment.passed else "before", None)]
        else:
            places = [(f"first {stage}", None) for stage, start in enumerate(starts) if index == start]
            places += [(f"last {n}", end - index) for n, end in enumerate(ends) if end - period < index <= end]
        for place in places:
            key = peak.moment.phase, peak.moment.time, *place
            known = found.get(key)
            if known is None or peak.total > known.total:
                found[key] = peak
    return found


def block_of(moment: Moment, blocks: str) -> int | None:
    """Returns the index of the block of a moment; None outside of blocks."""
    match = re.match(rf"{re.escape(blocks)}\.(\d+)", moment.module)
    return int(match[1]) if match else None


def _moved(moment: Moment, number: int | None, blocks: str) -> Moment:
    """The moment in a deeper model, in which its block has the number ``number``."""
    index = block_of(moment, blocks)
    if index is None or number is None:
        return moment
    rest = moment.module[len(f"{blocks}.{index}") :]
    return replace(moment, module=f"{blocks}.{number}{rest}")
