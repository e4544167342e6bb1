# SPDX-License-Identifier: Apache-2.0
"""A stage: the model itself, in which stubs replace the layers of other stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from neuron_accel.contract.families import Stack
from neuron_accel.errors import UnsupportedModelError
from neuron_accel.strategies.pipeline.p2p import Form, Values
from neuron_accel.strategies.pipeline.stubs import (
    BlockReturned,
    Exit,
    FirstStageLayer,
    LastStageLayer,
    Skipped,
    StageEnd,
    StageInput,
    StageState,
)


@dataclass
class Place:
    """The place of a module in a model.

    Args:
        parent: the parent module.
        name: name of the module in the parent.
        rest: the module that is there between passes.
    """

    parent: nn.Module
    name: str
    rest: nn.Module

    def put(self, module: nn.Module) -> None:
        setattr(self.parent, self.name, module)


@dataclass
class Stage:
    """One stage that this rank runs.

    Args:
        index: index of the stage, from 0.
        last: whether it is the last stage.
        forward: the model's own forward.
        state: the state that its stubs share.
        swaps: the modules that replace others while the stage runs.
    """

    index: int
    last: bool
    forward: Callable[..., Any]
    state: StageState
    swaps: list[tuple[Place, nn.Module]] = field(default_factory=list)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], received: Values) -> Any:
        """Runs the forward pass of one micro-batch.

        Args:
            args, kwargs: the model's arguments for this micro-batch.
            received: the tensors from the previous stage; empty on the first.

        Returns:
            The model's output on the last stage; the tensors to send to the next stage on the others.
        """
        with self._in_place():
            self.state.received, self.state.entered = received, False
            try:
                output = self.forward(*args, **kwargs)
            except StageEnd as end:
                end.__traceback__ = None  # its frames hold activations
                return end.values
            finally:
                self.state.received, self.state.beside = (), ()
        if not self.last:
            raise UnsupportedModelError(
                f"The model's forward ended before it reached the end of stage {self.index}.",
                why="a stage ends where the next block would be called",
            )
        return output

    def expected(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        """Returns the form of the tensors that the previous stage sends, from this stage's first block, which returns
        what the blocks before it do. For runs without the other ranks.

        Args:
            args, kwargs: the model's arguments for a micro-batch.
        """
        self.state.as_tuple = False
        output = self._first_block(args, kwargs)
        if isinstance(output, (tuple, list)):
            self.state.as_tuple = True
            output = self._first_block(args, kwargs)
            return Form.of(tuple(v if isinstance(v, torch.Tensor) else None for v in output), True)
        return Form.of((output,), False)

    def _first_block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the first block of this stage returns for hidden states of the right shape. If the blocks before
        it return tuples and their stubs do not, these shapes are wrong, but not the type of the result."""
        with self._in_place(), torch.no_grad():
            self.state.trying = True
            try:
                self.forward(*args, **kwargs)
            except BlockReturned as found:
                found.__traceback__ = None
                return found.output
            finally:
                self.state.trying = False
        raise UnsupportedModelError(f"The model's forward did not reach stage {self.index}.")

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        for place, module in self.swaps:
            place.put(module)
        try:
            yield
        finally:
            for place, _ in self.swaps:
                place.put(place.rest)


def make_stages(
    model: nn.Module, stack: Stack, starts: tuple[int, ...], own: list[int], forward: Callable[..., Any]
) -> list[Stage]:
    """Removes the modules of other ranks' stages from a model.

    Args:
        model: the model; changed in place.
        stack: its blocks.
        starts: for each stage, the index of its first block.
        own: the stages of this rank, ascending.
        forward: the model's own forward.

    Returns:
        This rank's stages, ascending.
    """
    modules = dict(model.named_modules())
    container = modules[stack.container]
    blocks = list(container.children())
    stops = (*starts[1:], stack.blocks)
    states = {stage: StageState(stack.block(stops[stage] - 1)) for stage in own}
    wanted = {stage: _blocks_of(blocks, starts[stage], stops[stage], states[stage]) for stage in own}
    places: list[tuple[Place, dict[int, nn.Module]]] = []
    for index, block in enumerate(blocks):
        options = {stage: wanted[stage][index] for stage in own}
        rest = next((m for m in options.values() if m is block), options[own[0]])
        places.append((Place(container, str(index), rest), options))
    for stage in own:
        last_block = blocks[stops[stage] - 1]
        last_block.register_forward_hook(functools.partial(_remember_form, states[stage]))
    places += _ends(model, stack, len(starts), own, states)
    for place, _ in places:
        place.put(place.rest)
    return [
        Stage(
            index=stage,
            last=stage == len(starts) - 1,
            forward=forward,
            state=states[stage],
            swaps=[(place, options[stage]) for place, options in places if options[stage] is not place.rest],
        )
        for stage in own
    ]


def _blocks_of(blocks: list[nn.Module], start: int, stop: int, state: StageState) -> list[nn.Module]:
    result: list[nn.Module] = []
    for index, block in enumerate(blocks):
        if start <= index < stop:
            result.append(block)
        elif index == start - 1:
            result.append(StageInput(block, state, following=blocks[start]))
        elif index == stop:
            result.append(Exit(block, state))
        else:
            result.append(Skipped(block, state))
    return result


def _remember_form(state: StageState, module: nn.Module, args: Any, output: Any) -> None:
    state.as_tuple = isinstance(output, (tuple, list))
    state.beside = tuple(output[1:]) if state.as_tuple else ()


def _ends(
    model: nn.Module, stack: Stack, stages: int, own: list[int], states: dict[int, StageState]
) -> list[tuple[Place, dict[int, nn.Module]]]:
    """Returns the places of the layers before and after the blocks, and the modules there in each of this rank's
    stages."""
    places: list[tuple[Place, dict[int, nn.Module]]] = []
    for fqns, home in ((stack.before, 0), (stack.after, stages - 1)):
        for fqn in fqns:
            for name, parent, child, module in _holders(model, fqn):
                options: dict[int, nn.Module] = {}
                for stage in own:
                    if stage == home:
                        options[stage] = module
                    elif home == 0:
                        options[stage] = FirstStageLayer(name, module, states[stage])
                    else:
                        options[stage] = LastStageLayer(name)
                rest = module if home in own else options[own[0]]
                places.append((Place(parent, child, rest), options))
    return places


def _holders(model: nn.Module, fqn: str) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Yields FQN, parent, name and module of each module at or below ``fqn`` that has parameters of its own."""
    parent_name, _, child = fqn.rpartition(".")
    parent = model.get_submodule(parent_name)
    module = getattr(parent, child)
    if any(True for _ in module.parameters(recurse=False)):
        yield fqn, parent, child, module
        return
    for name, _ in list(module.named_children()):
        yield from _holders(model, f"{fqn}.{name}")
