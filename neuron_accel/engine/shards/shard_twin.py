# SPDX-License-Identifier: Apache-2.0
"""The twin of a user's optimizer that updates this rank's shards: its groups, names, attributes and state.

A tensor that the twin updates consists of the shard of one parameter or, on devices that compile, of several.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.engine.optim.elementwise import is_elementwise
from neuron_accel.engine.optim.full_parameter import FullParameterOptimizer
from neuron_accel.engine.optim.state import StatePiece, check_groups, share_options, state_of
from neuron_accel.engine.optim.twin import StandIn, recipe_of, translate, twin
from neuron_accel.engine.shards.build import record_of
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.sharding.layout import Layout
    from neuron_accel.engine.shards.shard import BucketShard, ParameterShard


class ShardTwin:
    """Keeps the twin of an optimizer the same as that, but for shards.

    Args:
        optimizer: the user's optimizer, whose groups and options are the ones that count. It keeps no state of
            parameters that have shards.
        run: the run.
        plugin: name of the plugin, for messages.
        keeps_parameters: whether shards are full parameters.

    Attributes:
        shards: this rank's shard of every bucket.
        inner: the twin, once :meth:`create` was called; if it needs parameters in full that are sharded along other
            axes, the :class:`FullParameterOptimizer` around it.
    """

    inner: torch.optim.Optimizer

    def __init__(self, optimizer: torch.optim.Optimizer, run: Run, plugin: str, *, keeps_parameters: bool) -> None:
        self.optimizer, self.run, self._plugin, self._keeps_parameters = optimizer, run, plugin, keeps_parameters
        self.shards: list[BucketShard] = []
        self._layouts: dict[nn.Parameter, Layout] = {}
        self._places: dict[torch.Tensor, tuple[BucketShard, ParameterShard | None, int]] = {}  # and index of the group
        self._elsewhere: dict[torch.Tensor, dict[str, Any]] | None = None  # of parameters that other ranks keep
        self._recipe = recipe_of(optimizer)
        self._exists = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self.optimizer).__name__}: {len(self.shards)} buckets>"

    @property
    def of_shards(self) -> torch.optim.Optimizer:
        """The optimizer of the class of the user's, of this rank's shards."""
        return self.inner.optimizer if isinstance(self.inner, FullParameterOptimizer) else self.inner

    @property
    def state(self) -> Any:
        """The state of this rank's shards, by the tensors that are updated."""
        return state_of(self.inner.inner if isinstance(self.inner, FullParameterOptimizer) else self.inner)

    @property
    def _joining(self) -> list[BucketShard]:
        return [shard for shard in self.shards if shard.joins]

    @property
    def unsharded(self) -> list[nn.Parameter]:
        """The parameters that never trained, and have no shards."""
        sharded = {p for shard in self.shards for p in shard.parameters}
        return [p for group in self.optimizer.param_groups for p in group["params"] if p not in sharded]

    # ---- which tensors it updates ------------------------------------------------------------------------------------
    def create(self) -> None:
        """Creates the twin, for the shards so far."""
        optimizer = self.optimizer
        state = self._sharded_state(self.shards)
        self.inner = twin(optimizer, [self._group(group) for group in optimizer.param_groups], state)
        self._copy_attributes()
        self._translate()
        share_options(optimizer, self.inner)
        if self._needs_full_parameters():
            self.inner = FullParameterOptimizer(self.inner, self._layouts, self.run)
        self._release(self.shards)
        if self._recipe is not None:
            del optimizer._neuron_accel_recipe  # type: ignore[attr-defined]
        self._exists = True

    def add(self, shards: list[BucketShard]) -> None:
        """Adds further shards, of parameters in groups that it has."""
        self.shards += shards
        index_of = {p: index for index, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        for shard in shards:
            self._places |= {p: (shard, None, index_of[p]) for p in shard.parameters}
            for piece in shard.pieces:
                self._places[piece.parameter] = (shard, piece, index_of[piece.parameter])
                self._layouts[piece.master] = shard.bucket.records[piece.span.parameter].layout
        if not self._exists:
            return
        state: Mapping[Any, Mapping[str, Any]] = self._sharded_state(shards)
        known = self.optimizer.param_groups[: len(self.inner.param_groups)]
        group_of = {p: index for index, group in enumerate(known) for p in group["params"]}
        added: list[list[nn.Parameter]] = [[] for _ in known]
        for master, pieces in _updated(shards):
            if pieces[0].parameter in group_of:
                added[group_of[pieces[0].parameter]].append(master)
        full = self.inner if isinstance(self.inner, FullParameterOptimizer) else None
        for index, (group, masters) in enumerate(zip(self.inner.param_groups, added, strict=True)):
            if full is None:
                group["params"].extend(masters)
            else:
                full.extend_group(index, masters)
            self._name(group, known[index])
        self._copy_attributes()
        self._translate()
        if self._recipe is not None:
            options = [{name: value for name, value in group.items() if name != "param_names"} for group in known]
            groups = [{**group, "params": masters} for group, masters in zip(options, added, strict=True)]
            state = {**state_of(self._recipe.build(groups)), **state}
        for updated, entries in state.items():
            if full is None:
                state_of(self.inner)[updated] = dict(entries)
            else:
                full.put_state(updated, entries)
        self._release(shards)

    def add_group(self, group: dict[str, Any]) -> None:
        """Adds a group that the user's optimizer has got, whose parameters have shards."""
        self.inner.add_param_group(self._group(group))
        self._release(self.shards)
        self._copy_attributes()
        self._translate()
        share_options(self.optimizer, self.of_shards)

    def replace(self, replaced: Mapping[torch.Tensor, list[nn.Parameter]]) -> None:
        """Replaces tensors in the groups by others, for which there is state already."""
        if replaced and self._exists:
            for group, known in zip(self.inner.param_groups, self.optimizer.param_groups, strict=False):
                group["params"][:] = [new for p in group["params"] for new in replaced.get(p, [p])]
                self._name(group, known)

    def _needs_full_parameters(self) -> bool:
        """Returns whether parameters are sharded along other axes and the optimizer needs them in full."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        cut = self._keeps_parameters and any(record_of(p, self.run).layout.axes for p in parameters)
        return cut and not is_elementwise(self.optimizer)

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        of_parameter: dict[nn.Parameter, list[nn.Parameter]] = defaultdict(list)
        for master, pieces in _updated(self.shards):
            of_parameter[pieces[0].parameter].append(master)
        result = {**group, "params": [master for p in group["params"] for master in of_parameter[p]]}
        self._name(result, group)
        return result

    def _name(self, inner: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Sets the names in a group of the twin to those of the parameters in ``group``."""
        if "param_names" not in group:
            return
        names = dict(zip(group["params"], group["param_names"], strict=True))
        pieces_of = dict(_updated(self.shards))
        inner["param_names"] = [", ".join(names[p.parameter] for p in pieces_of[master]) for master in inner["params"]]

    # ---- what it knows of them ---------------------------------------------------------------------------------------
    def _stand_in(self, piece: ParameterShard, updated: nn.Parameter) -> StandIn:
        """Returns the stand-in of a parameter for the tensor ``updated``, which is updated instead of one shard of
        it."""
        return StandIn(updated, partial(_shard_entry, piece=piece, plugin=self._plugin, like=updated))

    def _translate(self) -> None:
        """Adds the shards to what the optimizer stores by parameter."""
        stand_ins: dict[torch.Tensor, list[StandIn]] = defaultdict(list)
        for updated, pieces in _updated(self.shards):
            if len(pieces) == 1:
                stand_ins[pieces[0].parameter].append(self._stand_in(pieces[0], updated))
        translate(self.of_shards, stand_ins)

    def _copy_attributes(self) -> None:
        """Copies attributes that the user has set on parameters to the tensors that are updated instead of them."""
        for shard in self.shards:
            for updated, pieces in shard.updated():
                parameter = pieces[0].parameter  # if there are several, all have the same attributes
                if len(pieces) > 1:
                    vars(updated).update(vars(parameter))
                elif vars(parameter):
                    self._stand_in(pieces[0], updated).take_attributes(parameter)

    def _sharded_state(self, shards: Iterable[BucketShard]) -> dict[torch.Tensor, dict[str, Any]]:
        """Returns the shards of state that the user's optimizer has from the start or from earlier steps."""
        state: dict[torch.Tensor, dict[str, Any]] = {}
        known = state_of(self.optimizer)
        for shard in shards if known else ():
            entries_of = shard.open(state)
            for piece in shard.pieces:
                for name, value in known.get(piece.parameter, {}).items():
                    sharded = _shard_entry(value, piece, self._plugin, piece.master)
                    entries_of.setdefault(piece.master, {})[name] = sharded
            self.replace(shard.close(state))
        return state

    def _release(self, shards: Iterable[BucketShard]) -> None:
        """Removes the state of sharded parameters from the user's optimizer, as the twin has it."""
        known = state_of(self.optimizer)
        for shard in shards:
            for parameter in shard.parameters:
                known.pop(parameter, None)

    # ---- state by parameter ------------------------------------------------------------------------------------------
    def state_pieces(self, *, masters: bool) -> list[StatePiece]:
        """Returns the state of this rank's shards, of every parameter; with ``masters``, with their own weights."""
        held = [piece.parameter for shard in self.shards for piece in shard.pieces]
        found = (self.piece_of(parameter, masters=masters) for parameter in (*held, *self.unsharded))
        return [piece for piece in found if piece is not None]

    def piece_of(self, parameter: torch.Tensor, *, masters: bool = True) -> StatePiece | None:
        """Returns where this rank's state of a parameter is; None if it is none of the optimizer's."""
        if parameter not in self._places:
            groups = enumerate(self.optimizer.param_groups)
            index = next((i for i, group in groups if any(p is parameter for p in group["params"])), None)
            if index is None:
                return None
            assert isinstance(parameter, nn.Parameter)  # it never trained, and what was loaded for it is unsharded
            record, known, stop = record_of(parameter, self.run), state_of(self.optimizer), parameter.numel()
            return StatePiece(record=record, parameter=parameter, start=0, stop=stop, group=index, store=known)
        shard, piece, index = self._places[parameter]
        self._describe_elsewhere()
        axes = shard.bucket.reduction_axes
        if piece is None:
            none = (0, 1) if self._keeps_parameters and parameter.dim() > 1 else (0,)
            return StatePiece(
                record=record_of(parameter, self.run),  # type: ignore[arg-type]
                parameter=nn.Parameter(parameter.new_empty(none, dtype=shard.optimizer_dtype)),
                start=0,
                stop=0,
                group=index,
                axes=axes,
                key=parameter,
                store=self._elsewhere,  # type: ignore[arg-type]
            )
        store: MutableMapping[Any, Any] = shard.open(self.state)
        key = piece.master
        if isinstance(self.inner, FullParameterOptimizer):
            store, key = self.inner.place_of_state(piece.master)
        return StatePiece(
            record=shard.bucket.records[piece.span.parameter],
            parameter=piece.master,
            start=piece.span.start,
            stop=piece.span.stop,
            group=index,
            axes=axes,
            master=piece.master.dtype != piece.parameter.dtype and masters,
            whole=key is not piece.master,
            key=key,
            store=store,
        )

    def _describe_elsewhere(self) -> None:
        """Gives parameters without elements on this rank the entries that others have, without elements: so all ranks
        can do the same with them."""
        if self._elsewhere is None:  # as things are now: loops remove state of one parameter after another
            self._elsewhere = {}
            everything = [piece for shard in self.shards for piece in shard.pieces]
            for shard in self.shards:
                absent = [p for p in shard.parameters if self._places[p][1] is None]
                near = (self.piece_of(piece.parameter) for piece in (*shard.pieces, *everything) if absent)
                found = (piece.read_state(None) for piece in near if piece is not None)
                entries = next((each for each in found if len(each)), {})
                self._elsewhere |= {p: {n: _without_elements(v) for n, v in entries.items()} for p in absent}

    # ---- an update ---------------------------------------------------------------------------------------------------
    def take_over(self) -> None:
        """Applies values that were written to master weights and state by parameter."""
        for shard in self._joining:
            self.replace(shard.close(self.state))

    @contextmanager
    def updating(self, *, by_gradients: bool = True) -> Iterator[None]:
        """A context manager for an update of the shards.

        Args:
            by_gradients: whether it uses gradients. Tensors are then split of which only some parameters have one.
        """
        check_groups(self.optimizer, self.inner)
        self._copy_attributes()
        self._elsewhere = None
        joining = self._joining
        state = self.state if joining else {}
        for shard in self.shards:
            if replaced := shard.before_update(state, by_gradients=by_gradients):
                self.replace(replaced)
        yield
        for shard in joining:
            shard.after_update()


def _updated(shards: Iterable[BucketShard]) -> Iterator[tuple[nn.Parameter, Sequence[ParameterShard]]]:
    """Yields the tensors that the twin updates, each with the parameter shards that it consists of."""
    return (pair for shard in shards for pair in shard.updated())


def _without_elements(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.new_empty(0) if value.dim() else value.clone()


def _shard_entry(value: Any, piece: ParameterShard, plugin: str, like: torch.Tensor) -> Any:
    """Returns the part of a value that belongs to ``piece``, in the shape of ``like``."""
    parameter, span = piece.parameter, piece.span
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape and parameter.dim() > 0:
        part = value.reshape(-1)[span.start : span.stop]
        part = F.pad(part, (0, span.padding)) if span.padding else part
        return part.clone().view(like.shape).to(like.dtype if value.is_floating_point() else value.dtype)
    if value.numel() == 1 or like.shape == parameter.shape:
        return value.clone()
    raise UsageError(
        f"State of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)} cannot be sharded.",
        where=f"plugin {plugin!r}",
        fix="prepare the optimizer before its first step",
    )
