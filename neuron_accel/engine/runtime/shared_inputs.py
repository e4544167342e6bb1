# SPDX-License-Identifier: Apache-2.0
"""Compares what ranks that compute one forward pass together compute it from: inputs, and random numbers.

Different inputs or dropout masks in a tensor-parallel group would not raise an error, but give a meaningless loss, and
replicated weights that drift apart. A loader compares the first batch of an epoch by itself; this compares everything
after it, and what the training loop draws. All that is to be equal goes into one checksum, so that an exchange now and
then also finds a difference in a pass before it. It also compares the gradients of parameters of which every rank has a
copy, which a loop has changed differently if it clips by a norm of its own shards.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.engine.plan.mesh import AxisKind
from neuron_accel.errors import DesyncError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from neuron_accel.engine.runtime.join import Ranks

EVERY = 8
"""Number of forward passes from one exchange to the next, but for the first ones."""
EARLY = (1, 2, 4)
"""Numbers of passes after which there is an exchange, too: a short run is compared."""
ROUNDING = 1e-3
"""Relative difference of norms that rounding explains, also in bfloat16."""
FLOOR = 1e-4
"""Norms are held to at least this part of the largest: a gradient of zero may be one of rounding."""


class SharedInputs:
    """Checksums of batches, inputs of prepared models and states of random number generators, compared over the ranks
    that hold shards or stages of one model.

    Inputs are compared where they are integers, such as token ids: real ones may be computed by a model whose results
    differ in rounding. States of generators are not compared between pipeline stages, which draw for different layers.

    Args:
        run: the run.
    """

    def __init__(self, run: Ranks) -> None:
        self._run = run
        self._inputs = self._numbers = 0
        self._passes = 0
        self._norms: list[torch.Tensor] = []
        self._due = False

    @property
    def compares(self) -> bool:
        """Whether there are other ranks to compare with, and values to compare."""
        run = self._run
        return run.backend.has_values and run.mesh.size(run.mesh.model_axes) > 1

    def watch(self, module: nn.Module) -> list[RemovableHandle]:
        """Compares before forward passes of a prepared model. Collective. Returns the handle of the hook, if there is
        anything to compare."""
        if not self.compares:
            return []
        self._run.group(*self._run.mesh.model_axes)  # the first request creates it
        compare = torch.compiler.disable(
            self.before_forward, reason="inputs are compared before a compiled forward pass"
        )
        return [module.register_forward_pre_hook(BeforeForward(compare), prepend=True, with_kwargs=True)]

    def add(self, checksum: int) -> None:
        """Adds the checksum of a batch."""
        self._inputs = zlib.crc32(checksum.to_bytes(8, "little"), self._inputs)
        self._due = True

    def add_gradients(self, norm: torch.Tensor | None) -> None:
        """Adds the norm, 0-dim, of gradients that are equal on all ranks of a stage; None on ranks that have none, but
        take part in the exchange."""
        if norm is not None:
            self._norms.append(norm)
        self._due = True

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Adds the inputs of a forward pass and the state of the generators before it. Collective once in
        :data:`EVERY` calls, beginning with the first, and after the first ones."""
        run = self._run
        exchanges = self._passes % EVERY == 0 or self._passes in EARLY
        self._passes += 1
        for tensor in _integers([*args, *kwargs.values()]):
            if tensor.device.type == "cpu" or (exchanges and not run.backend.is_lazy):
                self._inputs = checksum_of(tensor, self._inputs)
        for state in self._states():
            self._numbers = zlib.crc32(state, self._numbers)
        self._due = True
        if exchanges:
            self.compare()

    def _states(self) -> Iterator[bytes]:
        generator = self._run.backend.generator
        state = generator.get_state()
        yield state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state).encode()
        if generator.apart and not self._run.backend.is_lazy:  # ranks that are threads share the CPU's
            yield torch.get_rng_state().numpy().tobytes()

    def compare(self) -> None:
        """Compares all that was added since the last time. Collective; does nothing if nothing was added.

        Raises:
            DesyncError: on all of the ranks, if something differs between them.
        """
        if not self._due or not self.compares:
            return
        run = self._run
        group = run.group(*run.mesh.model_axes)
        stage = run.mesh.position(run.backend.rank, run.mesh.names(AxisKind.STAGE))
        norms = [float(norm.cpu()) for norm in self._norms]  # on a lazy device, computed by the graphs of the steps
        everyone = run.backend.all_gather_object((stage, self._inputs, self._numbers, norms), group)
        self._inputs = self._numbers = 0
        self._norms, self._due = [], False
        by_stage = {stage: (numbers, norms) for stage, _, numbers, norms in reversed(everyone)}  # of the first of each
        for rank, (stage, inputs, *mine) in zip(group.ranks, everyone, strict=True):
            numbers, norms = by_stage[stage]
            if inputs != everyone[0][1]:
                self._refuse(f"Rank {rank} computes a forward pass of other samples than rank {group.ranks[0]}.")
            first = next(r for r, (s, *_) in zip(group.ranks, everyone, strict=True) if s == stage)
            if mine[0] != numbers:
                self._refuse(f"Rank {rank} draws other random numbers than rank {first}.")
            least = FLOOR * max(norms, default=0.0)
            if any(abs(a - b) > ROUNDING * max(b, least) for a, b in zip(mine[1], norms, strict=False)):  # not if NaN
                self._refuse_gradients(rank, first)

    def _refuse(self, what: str) -> None:
        group = self._run.group(*self._run.mesh.model_axes)
        recent = "the first forward pass" if self._passes <= 1 else f"one of the last {EVERY} forward passes"
        raise DesyncError(
            what,
            where=f"{recent}, ranks {list(group.ranks)} of group {group.name!r}",
            why="they hold shards of one model, which needs the same samples, dropout masks and noise on all of them; "
            "their results would be meaningless",
            fix="seed by data-parallel rank, set_seed(seed + accelerator.process_index) in place of set_seed(seed, "
            "device_specific=True); seed the random numbers of datasets; and give what one rank alone draws a "
            "generator of its own",
        )

    def _refuse_gradients(self, rank: int, other: int) -> None:
        group = self._run.group(*self._run.mesh.model_axes)
        raise DesyncError(
            f"Ranks {rank} and {other} stepped with different gradients of parameters that both hold in full.",
            where=f"one of the last {EVERY} steps, ranks {list(group.ranks)} of group {group.name!r}",
            why="each has changed its gradients by itself, for example clipped them by a norm of `parameter.grad`, "
            "which is that of its own shards; the copies of a weight drift apart",
            fix="clip with accelerator.clip_grad_norm_(model.parameters(), max_norm), which returns the norm over all "
            "ranks, in place of torch.nn.utils.clip_grad_norm_",
        )


class BeforeForward:
    """The hook of a model, which a copy of the model does not have in effect.

    Args:
        compare: receives the arguments of a forward pass; None in a copy.
    """

    def __init__(self, compare: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None) -> None:
        self._compare = compare

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._compare is not None:
            self._compare(args, kwargs)

    def __reduce__(self) -> tuple[type[BeforeForward], tuple[()]]:
        return BeforeForward, ()


def checksum_of(tensor: torch.Tensor, before: int = 0) -> int:
    """Returns a checksum (CRC-32) of a tensor's shape, dtype and values, continuing from ``before``."""
    total = zlib.crc32(f"{tuple(tensor.shape)}{tensor.dtype}".encode(), before)
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, total) if flat.numel() else total


def _integers(values: list[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point() and not value.is_complex():
                yield value
        elif isinstance(value, Mapping):
            yield from _integers([*value.values()])
