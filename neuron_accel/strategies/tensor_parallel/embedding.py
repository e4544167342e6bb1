# SPDX-License-Identifier: Apache-2.0
"""Token embedding and head, sharded along the vocabulary."""

from __future__ import annotations

import dis
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.contract import WithProductHooks, copy_to_group, reduce_from_group
from neuron_accel.errors import UnsupportedModelError
from neuron_accel.strategies.tensor_parallel.linear import take_over
from neuron_accel.strategies.tensor_parallel.vocabulary import Vocabulary, VocabularyShard


class VocabularyParallelEmbedding(WithProductHooks, nn.Embedding):
    """An ``nn.Embedding`` with its rows sharded over ranks. Input: ids of any shape; output: [..., embedding_dim],
    replicated."""

    vocabulary: Vocabulary

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        vocabulary = self.vocabulary
        vocabulary.check(input, "Token id")
        row = input - vocabulary.start(input.device)
        elsewhere = (row < 0) | (row >= vocabulary.local_size)
        found = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
        if self.padding_idx is not None:  # the row of padding_idx gets no gradient
            found = torch.where((input == self.padding_idx).unsqueeze(-1), found.detach(), found)
        found = self._product(input, found.masked_fill(elsewhere.unsqueeze(-1), 0))
        return reduce_from_group(found, vocabulary.backend, vocabulary.group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, degree={self.vocabulary.group.size}"


class VocabularyParallelHead(WithProductHooks, nn.Linear):
    """The projection to the vocabulary, with its rows sharded over ranks. Input: [..., hidden], replicated; output:
    logits [..., vocabulary].

    The logits are gathered, unless ``sharded_logits`` is set; then they are a :class:`VocabularyShard`. Under
    torch.compile, which does not support that subclass, they are always gathered.
    """

    vocabulary: Vocabulary
    sharded_logits: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.sharded_logits and not torch.compiler.is_compiling():
            return self.logits_for_loss(input)
        return self.vocabulary.gather(self._local_logits(input))

    def logits_for_loss(self, input: torch.Tensor) -> VocabularyShard:
        """Returns sharded logits."""
        return VocabularyShard.of(self._local_logits(input), self.vocabulary)

    def _local_logits(self, input: torch.Tensor) -> torch.Tensor:
        entered = copy_to_group(input, self.vocabulary.backend, self.vocabulary.group)
        return self._product(entered, F.linear(entered, self.weight, self.bias))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, degree={self.vocabulary.group.size}"


def is_plain(module: nn.Module, expected: type[nn.Module]) -> bool:
    """Returns whether a module has the forward of ``expected``."""
    return type(module).forward is expected.forward and "forward" not in vars(module)


def is_scaled_embedding(module: nn.Module) -> bool:
    """Returns whether a module is an embedding that only changes the result of the lookup, for example scales it."""
    cls = type(module)
    forward = getattr(cls.forward, "__code__", None)
    if forward is None or "forward" in vars(module) or cls.__bases__ != (nn.Embedding,):
        return False
    read = [instruction.argval for instruction in dis.get_instructions(forward)]
    of_table = {after for name, after in itertools.pairwise(read) if name == "weight"}
    return "forward" in read and of_table <= {"dtype", "device"}


def parallel_embedding(fqn: str, source: nn.Embedding, vocabulary: Vocabulary) -> VocabularyParallelEmbedding:
    """Returns the module that replaces a token embedding, still with the full table.

    Raises:
        UnsupportedModelError: for options that need the rows of other ranks.
    """
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(source, option):
            raise UnsupportedModelError(
                f"The embedding {fqn!r} has {option}={getattr(source, option)!r}.",
                why="a rank sees only the gradients and norms of its own rows",
                fix=f"build it without {option}, or keep it unsharded with parallelize_embeddings=False",
            )
    cls: type[VocabularyParallelEmbedding] = VocabularyParallelEmbedding
    if not is_plain(source, nn.Embedding):  # a subclass that calls super().forward, which is then that of this class
        cls = type(type(source).__name__, (type(source), VocabularyParallelEmbedding), {})
    module = take_over(cls, source)
    module.vocabulary = vocabulary
    return module


def parallel_head(source: nn.Linear, vocabulary: Vocabulary) -> VocabularyParallelHead:
    """Returns the module that replaces the projection to the vocabulary, still with the full weight."""
    module = take_over(VocabularyParallelHead, source)
    module.vocabulary, module.sharded_logits = vocabulary, False
    return module
