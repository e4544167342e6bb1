# SPDX-License-Identifier: Apache-2.0
"""Stubs that replace the layers of other stages in the model of a stage.

A stage runs the model's own forward. Positions, rotary tables and masks are computed as usual from the batch. The stubs
of other stages' layers return their input. At the start of the stage its input is replaced by the received tensors, and
at its end the forward is left by an exception. Therefore no model has to be traced, copied or rewritten.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from neuron_accel.errors import UnsupportedModelError, UsageError
from neuron_accel.strategies.pipeline.microbatches import tensors
from neuron_accel.strategies.pipeline.p2p import Values


class StageEnd(Exception):
    """Exception that leaves a model's forward at the end of a stage.

    Args:
        values: the tensors to send to the next stage.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        super().__init__("the stage ends here")


class BlockReturned(Exception):
    """Exception that leaves a model's forward after a stage's first block.

    Args:
        output: what the block returned.
    """

    def __init__(self, output: Any) -> None:
        self.output = output
        super().__init__("the block has returned")


class StageState:
    """The state that the stubs of one stage share.

    Args:
        last_block: FQN of the stage's last block.
    """

    def __init__(self, last_block: str) -> None:
        self.last_block = last_block
        self.received: Values = ()
        self.as_tuple = False
        """Whether blocks return a tuple that begins with the hidden states."""
        self.beside: tuple[Any, ...] = ()
        """The other outputs of the stage's last block."""
        self.entered = False
        """Whether the current forward has reached the stage's first block."""
        self.trying = False
        """Whether the current forward is to end after the stage's first block."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StageState:
        copied = StageState(self.last_block)
        copied.as_tuple = self.as_tuple
        return copied

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "A pipelined model cannot be pickled.",
            why="this rank has some of its layers, and communicates with the ranks that have the others",
            fix="copy.deepcopy(model) for evaluation; accelerator.save_model(model, folder) or get_state_dict(model) "
            "for the full weights",
        )

    def returned(self, values: Values) -> Any:
        """Returns ``values`` in the form in which a block returns them."""
        return values if self.as_tuple else values[0]


class Skipped(nn.Module):
    """Replaces a block of another stage: returns the hidden states that it is called with.

    It has the block's plain attributes, by which some models choose a mask for it, and its forward pre-hooks.
    """

    stands_for_another_stage = True  # plugins that change the blocks of a model skip it

    def __init__(self, block: nn.Module, state: StageState) -> None:
        super().__init__()
        own = vars(self)
        for name, value in vars(block).items():
            if name not in own and isinstance(value, (str, int, float, bool, type(None))):
                setattr(self, name, value)
        # A pre-hook of the first block may shard the sequence.
        self._forward_pre_hooks.update(block._forward_pre_hooks)
        self._forward_pre_hooks_with_kwargs.update(block._forward_pre_hooks_with_kwargs)
        self.state = state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.state.returned((hidden_of(args, kwargs), *[None] * (len(self.state.received) - 1)))


class StageInput(Skipped):
    """Replaces the block before a stage's first one: returns the received tensors.

    Args:
        following: the stage's first block.
    """

    def __init__(self, block: nn.Module, state: StageState, following: nn.Module) -> None:
        super().__init__(block, state)
        self._following = (following,)  # in a tuple: it is not a module of this one

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.trying:
            raise BlockReturned(self._following[0](*args, **kwargs))
        self.state.entered = True
        return self.state.returned(self.state.received)


class Exit(Skipped):
    """Replaces the block after a stage's last one: leaves the forward with the hidden states, and with the other
    outputs of the last block that this block is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        called_with = {id(value) for value in (*args, *kwargs.values())}
        needed = [value if id(value) in called_with else None for value in self.state.beside]
        if any(True for value in needed if not isinstance(value, torch.Tensor) for _ in tensors(value)):
            raise UnsupportedModelError(
                f"{self.state.last_block!r} returns something other than a tensor beside the hidden states "
                f"({', '.join(type(value).__name__ for value in self.state.beside)}), and the next block takes it.",
                why="only tensors can be sent between stages, and a stage begins between these blocks",
                fix="let the block return the tensors themselves, split elsewhere (stage_cuts), or use no pipeline",
            )
        beside = [value if isinstance(value, torch.Tensor) else None for value in needed]
        raise StageEnd((hidden_of(args, kwargs), *beside))


class FirstStageLayer(nn.Module):
    """Replaces a layer before the first block on a stage other than the first.

    Its output has the right shape and is NaN, so that using it instead of the received tensors is noticed.
    """

    def __init__(self, fqn: str, module: nn.Module, state: StageState) -> None:
        super().__init__()
        self.fqn, self.state = fqn, state
        weight = next(module.parameters(recurse=False))
        self.dtype = weight.dtype
        looked_up = isinstance(module, nn.Embedding)
        self.width = weight.shape[-1] if looked_up else getattr(module, "out_features", None)
        self.embedding_dim, self.looked_up = self.width, looked_up
        for name in ("padding_idx", "num_embeddings"):
            if hasattr(module, name):
                setattr(self, name, getattr(module, name))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.entered:
            raise UnsupportedModelError(
                f"{self.fqn!r} is used after the blocks, but it is on the first stage only.",
                why="it is registered before the blocks, so it was assumed to be their input",
                fix="register it in the model after the blocks",
            )
        given = hidden_of(args, kwargs)
        if self.width is None:
            return given
        shape = given.shape if self.looked_up else given.shape[:-1]
        return torch.full((), torch.nan, dtype=self.dtype, device=given.device).expand(*shape, self.width)


class LastStageLayer(nn.Module):
    """Replaces a layer after the last block on a stage other than the last. It must not be called."""

    def __init__(self, fqn: str) -> None:
        super().__init__()
        self.fqn = fqn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(
            f"{self.fqn!r} is used before the last block, but it is on the last stage only.",
            why="it is registered after the blocks, so it was assumed to follow them",
            fix="register it in the model before the blocks",
        )


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Returns the first tensor that a layer is called with."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (tuple, list)) and value and isinstance(value[0], torch.Tensor):
            return value[0]
    raise UsageError("A block was called without hidden states.", why="stages send the hidden states to each other")
