# SPDX-License-Identifier: Apache-2.0
"""Resizes the vocabulary of a prepared model whose embedding and head are sharded, or are on some ranks only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.engine.runtime.tensors import full_tensor
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import UnsupportedModelError
from neuron_accel.models.architecture import family_inside, join_fqn

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord


@dataclass
class _Table:
    """The token embedding or the head.

    Args:
        fqn: its FQN.
        names: names of its own parameters.
        cls: its class.
        padding_idx: ``padding_idx`` of an embedding.
    """

    fqn: str
    names: tuple[str, ...]
    cls: type[nn.Module]
    padding_idx: int | None

    @classmethod
    def of(cls, fqn: str, module: nn.Module) -> _Table:
        names = tuple(name for name, _ in module.named_parameters(recurse=False))
        return cls(fqn, names, type(module), getattr(module, "padding_idx", None))

    @property
    def is_embedding(self) -> bool:
        return issubclass(self.cls, nn.Embedding)

    def plain_layer(self, parameters: dict[str, nn.Parameter]) -> nn.Module:
        """Returns a plain layer with these parameters.

        Raises:
            UnsupportedModelError: if the table is neither an embedding nor a linear layer.
        """
        if not issubclass(self.cls, (nn.Embedding, nn.Linear)):
            raise UnsupportedModelError(
                f"The vocabulary cannot be resized: {self.fqn!r} is a {self.cls.__name__}.",
                why="only tables that are embeddings or linear layers can, once a model is prepared",
                fix="call resize_token_embeddings before `prepare`",
            )
        rows, width = parameters["weight"].shape
        with torch.device("meta"):
            if self.is_embedding:
                module: nn.Module = nn.Embedding(rows, width, padding_idx=self.padding_idx)
            else:
                module = nn.Linear(width, rows, bias="bias" in parameters)
        for name, parameter in parameters.items():
            setattr(module, name, parameter)
        return module


class Resize:
    """Replaces a model's own ``resize_token_embeddings``, which would resize this rank's shards of the tables.

    All ranks must call it. Both tables are gathered temporarily and resized by the model's own method. The new rows of
    the first rank are used, and each rank keeps its shard of the result. Parameters stay the same objects.

    Args:
        model: the model that is being prepared, while it has all its layers; the layouts of its parameters are updated.
        owner: the model of transformers that ``model`` is or contains.
        run: ranks and backend.
    """

    def __init__(self, model: PreparedModel, owner: Any, run: Run) -> None:
        self._record, self._owner, self._run = model, owner, run
        self._model, self._parameters = model.module, model.parameters  # another module may wrap this one later
        found = dict.fromkeys((owner.get_input_embeddings(), owner.get_output_embeddings()))
        names = {module: name for name, module in self._model.named_modules()}
        self._tables = [_Table.of(names[module], module) for module in found if module in names]

    def __deepcopy__(self, memo: dict[int, Any]) -> Resize:
        return self

    def __call__(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """See transformers. Collective.

        Raises:
            UsageError: if an optimizer's state is already sharded like the old tables.
            UnsupportedModelError: if a table is not a plain layer, or the model's own method fails on another rank.
        """
        run = self._run
        with run.hooks.around("reshape", self._record, run):
            full = {r.fqn: nn.Parameter(self._full(r), requires_grad=False) for r, *_ in self._records()}
            plain_layers = {table.fqn: table.plain_layer(self._of(table, full)) for table in self._tables}
            resized = self._resize(plain_layers, full, new_num_tokens, pad_to_multiple_of, mean_resizing)
            for r, table, name in self._records():
                self._shard(r, resized[table.fqn].get_parameter(name).detach())
            for table in self._tables:
                self._show_sizes(table, resized[table.fqn])
            self._parameters.follow(self._model)
        return self._owner.get_input_embeddings()

    def _records(self) -> list[tuple[ParameterRecord, _Table, str]]:
        """Returns the records of the tables' parameters, each with one of its tables and its name there. Tied
        parameters are listed once, in the same order on every rank."""
        found: dict[str, tuple[ParameterRecord, _Table, str]] = {}
        for table in self._tables:
            for name in table.names:
                record = self._parameters[join_fqn(table.fqn, name)]
                found.setdefault(record.fqn, (record, table, name))
        return list(found.values())

    def _of(self, table: _Table, full: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return {name: full[self._parameters[join_fqn(table.fqn, name)].fqn] for name in table.names}

    def _full(self, record: ParameterRecord) -> torch.Tensor:
        """Returns the full parameter, on every rank. Collective."""
        run, current = self._run, record.current
        dtype = None if current is None else current.dtype
        value = None if current is None else full_tensor(current.detach(), record.layout, run).to(run.device)
        for axis, holders in record.holders.items():
            dtype = run.backend.broadcast_object(dtype, run.group(axis), holders[0])
            if value is None:
                value = torch.empty(record.layout.shape, dtype=dtype, device=run.device)
            value = run.backend.broadcast(value, run.group(axis), holders[0])
        assert value is not None  # ranks without a shard received it
        return value

    def _resize(
        self, plain_layers: dict[str, nn.Module], full: dict[str, nn.Parameter], *arguments: Any
    ) -> dict[str, nn.Module]:
        """Calls the model's own method with layers that have the full tables and temporarily replace those of this
        rank. Returns the resized layers. Collective."""
        tied = [(*slot, full[record.fqn]) for record, *_ in self._records() for slot in self._slots(record)]
        standing = {fqn: _child(self._model, fqn) for fqn in plain_layers}
        resized: dict[str, nn.Module] = {}
        error = None
        try:
            for parent, name, _, table in tied:
                parent.register_parameter(name, table)
            for fqn, plain in plain_layers.items():
                if standing[fqn] is None:
                    raise UnsupportedModelError(
                        f"The vocabulary cannot be resized: {fqn!r} is on another pipeline stage.",
                        fix="call resize_token_embeddings before `prepare`",
                    )
                self._model.set_submodule(fqn, plain)
            type(self._owner).resize_token_embeddings(self._owner, *arguments)
            resized = {fqn: self._model.get_submodule(fqn) for fqn in plain_layers}
        except Exception as e:
            error = e
        finally:
            for fqn, module in standing.items():
                if module is not None:
                    self._model.set_submodule(fqn, module)
            for parent, name, parameter, _ in tied:
                parent.register_parameter(name, parameter)
        failures = self._run.backend.all_gather_object(None if error is None else repr(error), self._run.world)
        if error is not None:
            raise error
        first = next((failure for failure in failures if failure is not None), None)
        if first is not None:
            raise UnsupportedModelError("The vocabulary cannot be resized.", why=f"on another rank: {first}")
        return resized

    def _slots(self, record: ParameterRecord) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Yields other modules of this rank that have the parameter of a table, and its name there."""
        tables = {table.fqn for table in self._tables}
        for parent, _, name in (fqn.rpartition(".") for fqn in record.names):
            module = None if parent in tables else _child(self._model, parent)
            if module is not None and name in module._parameters:
                yield module, name, getattr(module, name)

    def _shard(self, record: ParameterRecord, full: torch.Tensor) -> None:
        before = record.layout
        cuts = tuple(replace(cut, size=full.shape[cut.dim], blocks=()) for cut in before.cuts)
        layout = Layout(shape=tuple(full.shape), dtype=before.dtype, cuts=cuts)
        same = self._run.backend.broadcast(full, self._run.world)
        self._parameters.set_layout(record.fqn, layout)
        if record.current is not None:
            record.current.grad = None
            record.current.data = layout.shard(same, self._run.coordinates)

    def _show_sizes(self, table: _Table, resized: nn.Module) -> None:
        """Updates the size attributes of a table, or of its stub on this rank."""
        module: Any = self._model.get_submodule(table.fqn)
        size = len(resized.get_parameter("weight"))
        if hasattr(module, "vocabulary"):
            module.vocabulary = replace(module.vocabulary, size=size)
        if isinstance(resized, nn.Embedding):
            table.padding_idx = resized.padding_idx
            module.num_embeddings, module.padding_idx = size, resized.padding_idx
        elif isinstance(module, nn.Linear):
            module.out_features = len(module.weight)


def _child(model: nn.Module, fqn: str) -> nn.Module | None:
    try:
        return model.get_submodule(fqn)
    except AttributeError:
        return None  # it is on another stage


def install_resize(model: PreparedModel, run: Run) -> None:
    """Replaces ``resize_token_embeddings`` of a model by :class:`Resize`. Must be called while the model has all its
    layers.

    Args:
        model: the model that is being prepared; not changed unless it is or contains a model of transformers.
        run: ranks and backend.
    """
    found = family_inside(model.module)
    if found is None or not hasattr(type(found[1]), "resize_token_embeddings"):
        return
    owner: Any = found[1]
    with suppress(NotImplementedError):  # raised by a model without a token embedding
        owner.resize_token_embeddings = Resize(model, owner, run)
