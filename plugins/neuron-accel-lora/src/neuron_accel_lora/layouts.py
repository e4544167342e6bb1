# SPDX-License-Identifier: Apache-2.0
"""Layouts of the two factors of an adapter, which follow from the layout of the weight that they adapt.

A layer computes ``W x`` and its adapter ``B A x``. If the output features of ``W`` are sharded, so are the rows of
``B``, and ``A`` is replicated; if its input features are sharded, so are the columns of ``A``, and ``B`` is
replicated. The replicated factor has different inputs on each rank, so its gradient is summed over the ranks, not
averaged, which is the only communication.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from neuron_accel.contract import Cut, Layout
from neuron_accel.errors import UnsupportedModelError
from neuron_accel_lora.options import WHERE

if TYPE_CHECKING:
    from neuron_accel.contract import ParameterRecord
    from neuron_accel_lora.survey import Target


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Layouts of an adapter.

    Args:
        a: layout of A [r, in].
        b: layout of B [out, r].
        partial_a, partial_b: axes over which gradients are partial sums.
        inputs: the cut of the input features; None if there is none.
        outputs: the cut of the output features; None if there is none.
        own_inputs: whether ranks have different inputs (features or positions).
    """

    a: Layout
    b: Layout
    partial_a: tuple[str, ...]
    partial_b: tuple[str, ...]
    inputs: Cut | None
    outputs: Cut | None
    own_inputs: bool


def shard(target: Target, weight: ParameterRecord) -> Factors:
    """Returns the layouts of an adapter for the layout of the weight that it adapts.

    Args:
        target: the layer and its adapter.
        weight: record of the layer's weight.

    Raises:
        UnsupportedModelError: if the layout of the weight is not supported.
    """
    of_input, of_output = (0, 1) if target.turned else (1, 0)
    cuts = {cut.dim: cut for cut in weight.layout.cuts if cut.degree > 1}
    inputs, outputs = cuts.get(of_input), cuts.get(of_output)
    if inputs is not None and inputs.replicas > 1:
        raise _cannot(target, "several ranks hold the same input features")
    if target.embedding and inputs is not None and (len(inputs.blocks) > 1 or inputs.unit > 1):
        raise _cannot(target, "ranks do not hold consecutive entries")
    shape_a, shape_b = tuple(target.a.shape), tuple(target.b.shape)
    dtype_a, dtype_b = (str(t.dtype).removeprefix("torch.") for t in (target.a, target.b))
    return Factors(
        a=Layout(shape=shape_a, dtype=dtype_a, cuts=_moved(inputs, 1)),
        b=Layout(shape=shape_b, dtype=dtype_b, cuts=_moved(outputs, 0)),
        partial_a=_axes(weight, outputs),
        partial_b=_axes(weight, inputs),
        inputs=inputs,
        outputs=outputs,
        own_inputs=inputs is not None or bool(weight.partial_axes),
    )


def _moved(cut: Cut | None, dim: int) -> tuple[Cut, ...]:
    return () if cut is None else (dataclasses.replace(cut, dim=dim),)


def _axes(weight: ParameterRecord, cut: Cut | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*weight.partial_axes, *(() if cut is None else (cut.axis,)))))


def _cannot(target: Target, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{target.fqn!r} cannot be adapted with this layout.",
        where=WHERE,
        why=why,
        fix="leave it out with target_modules or exclude_modules",
    )
