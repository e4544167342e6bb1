"""Another number of tokens for a model whose vocabulary is divided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.engine.errors import UsageError
from neuron_accel.engine.layout import Cut, Layout
from neuron_accel.engine.parameters import ParameterMap
from neuron_accel.models.architecture import Architecture, join
from neuron_accel.strategies.tensor_parallel.division import AXIS
from neuron_accel.strategies.tensor_parallel.embedding import VocabularyParallelEmbedding, VocabularyParallelHead
from neuron_accel.strategies.tensor_parallel.linear import refresh_features
from neuron_accel.strategies.tensor_parallel.vocabulary import Vocabulary

if TYPE_CHECKING:
    from neuron_accel.engine.run import Run


class Resize:
    """In place of a model's own ``resize_token_embeddings``, which would resize this rank's shard.

    Every rank calls it. The tables are put together, the model's own method resizes them, and each rank keeps its rows
    of what came out; the first rank's new rows count. Every parameter stays the object that it is.

    Args:
        architecture: the model.
        run: ranks and backend.
        parameters: gets the new layouts.
    """

    def __init__(self, architecture: Architecture, run: Run, parameters: ParameterMap) -> None:
        self._architecture, self._run, self._parameters = architecture, run, parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> Resize:
        return self

    def __call__(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """As in transformers.

        Raises:
            UsageError: in a pipeline, or if an optimizer's state is divided like the old tables already.
        """
        owner, run = self._architecture.owner, self._run
        if run.mesh.degree("pp") > 1:
            raise UsageError(
                "resize_token_embeddings is not possible after `prepare` in a pipeline.",
                why="embedding and head are on different ranks, and a model's own method changes both",
                fix="call it before `prepare`, inside of lazy_load_for_parallelism if the model is loaded lazily",
            )
        parts = self._parts()
        record = next((m for m in run.models if m.parameters is self._parameters), None)
        for plugin in run.plan.plugins:
            plugin.before_reshape(record, run)
        wholes = {fqn: self._whole(fqn, module) for fqn, module in parts}
        _share(wholes)
        try:
            for fqn, whole in wholes.items():
                _put(self._architecture.model, fqn, whole)
            type(owner).resize_token_embeddings(owner, new_num_tokens, pad_to_multiple_of, mean_resizing)
            wholes = {fqn: self._architecture.model.get_submodule(fqn) for fqn in wholes}
        finally:
            for fqn, module in parts:
                _put(self._architecture.model, fqn, module)
        for fqn, module in parts:
            self._divide(fqn, module, wholes[fqn])
        self._parameters.follow(self._architecture.model)
        for plugin in run.plan.plugins:
            plugin.after_reshape(record, run)
        return owner.get_input_embeddings()

    def _parts(self) -> list[tuple[str, nn.Module]]:
        parts = [self._architecture.token_embedding, self._architecture.head]
        divided = (VocabularyParallelEmbedding, VocabularyParallelHead)
        return [part for part in parts if part is not None and isinstance(part[1], divided)]

    def _whole(self, fqn: str, module: nn.Module) -> nn.Module:
        """A plain layer with the whole of a divided one's parameters."""
        vocabulary = module.vocabulary
        full = {
            name: self._run.backend.all_gather(parameter.detach(), vocabulary.group, 0)[: vocabulary.size].contiguous()
            for name, parameter in module.named_parameters(recurse=False)
        }
        rows, width = full["weight"].shape
        with torch.device("meta"):
            if isinstance(module, nn.Embedding):
                plain: nn.Module = nn.Embedding(rows, width, padding_idx=module.padding_idx)
            else:
                plain = nn.Linear(width, rows, bias="bias" in full)
        for name, value in full.items():
            learns = getattr(module, name).requires_grad
            setattr(plain, name, nn.Parameter(value, requires_grad=learns))
            plain.get_parameter(name)._stands_for = getattr(module, name)  # type: ignore[attr-defined]
        return plain

    def _divide(self, fqn: str, module: nn.Module, whole: nn.Module) -> None:
        size, run = whole.weight.shape[0], self._run
        group, backend = module.vocabulary.group, module.vocabulary.backend
        module.vocabulary = Vocabulary(size=size, backend=backend, group=group)
        for name, value in whole.named_parameters(recurse=False):
            cut = Cut(dim=0, axis=AXIS, degree=group.size, size=size, padded=True)
            before = self._parameters[join(fqn, name)].layout
            layout = Layout(shape=tuple(value.shape), dtype=before.dtype, cuts=(cut,))
            same = backend.broadcast(value.detach().clone(), run.world)
            parameter = getattr(module, name)
            parameter.grad = None
            parameter.data = layout.shard(same, run.coordinates)
            self._parameters.set_layout(join(fqn, name), layout)
        if isinstance(module, nn.Embedding):
            module.num_embeddings, module.padding_idx = size, whole.padding_idx
        else:
            refresh_features(module)


def _share(wholes: dict[str, nn.Module]) -> None:
    """Ties what stands for tied parameters."""
    known: dict[nn.Parameter, nn.Parameter] = {}
    for whole in wholes.values():
        for name, parameter in list(whole.named_parameters(recurse=False)):
            original = parameter.__dict__.pop("_stands_for")
            setattr(whole, name, known.setdefault(original, parameter))


def _put(model: nn.Module, fqn: str, module: nn.Module) -> None:
    parent, _, name = fqn.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def install_resize(architecture: Architecture, run: Run, parameters: ParameterMap) -> None:
    """Lets a model with a divided vocabulary be resized after it was prepared."""
    divided = isinstance(architecture.token_embedding[1], VocabularyParallelEmbedding)
    if divided and hasattr(type(architecture.owner), "resize_token_embeddings"):
        architecture.owner.resize_token_embeddings = Resize(architecture, run, parameters)  # type: ignore[assignment]
