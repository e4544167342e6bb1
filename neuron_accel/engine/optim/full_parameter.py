# SPDX-License-Identifier: Apache-2.0
"""Exact steps of optimizers that need full parameters while ranks hold shards of them.

LAMB scales by a parameter's norm, Adafactor factors its rows and columns, Muon orthogonalises the matrix: applied to a
shard, each would silently compute something else. For the duration of a step all ranks that hold shards of a parameter
therefore gather it and update it in full, and each then keeps its own shard.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.engine.optim.elementwise import is_elementwise, is_separable, needs_closure
from neuron_accel.engine.optim.norms import GradientPart, global_norm
from neuron_accel.engine.optim.own_methods import OwnMethods
from neuron_accel.engine.optim.state import StateByParameter, StatePiece, check_groups, share_options, state_of
from neuron_accel.engine.optim.twin import StandIn, recipe_of, translate, twin
from neuron_accel.engine.plan.plugin import Claim
from neuron_accel.engine.runtime.tensors import full_tensor
from neuron_accel.errors import PlanError, UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.sharding.layout import Layout


def full_parameter_step(optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
    """Returns ``optimizer``, or a :class:`FullParameterOptimizer` around it if it needs full parameters and some are
    sharded.

    If a plugin owns the optimizer's state, ``optimizer`` is returned unchanged: the plugin handles this itself.

    Raises:
        PlanError: if it needs all parameters, and some are on other ranks only.
        UsageError: if full parameters are needed on a device that compiles.
    """
    if run.owner(Claim.OPTIMIZER_STATE) is not None:
        return optimizer
    records = {p: run.find_parameter(p) for group in optimizer.param_groups for p in group["params"]}
    somewhere = any(record is not None and record.holders for record in records.values())
    if somewhere and (needs_closure(optimizer) or not is_separable(optimizer)):
        raise PlanError(
            f"{type(optimizer).__name__} uses all parameters together, but a rank has only some of them.",
            where="prepare()",
            why="a norm over all of them, a line search, or an estimate of the best learning rate would differ by rank",
            fix="train without a pipeline, or choose an optimizer that updates every parameter by itself",
        )
    layouts = {p: record.layout for p, record in records.items() if record is not None and record.layout.axes}
    if not layouts or is_elementwise(optimizer):
        return optimizer
    if run.backend.is_lazy:
        raise UsageError(
            f"{type(optimizer).__name__} needs full parameters, and some are sharded.",
            where=f"prepare(), backend {run.backend.name!r}",
            why="the update of an element depends on other elements, and gathering them in each step would take graphs "
            "of its own on this device",
            fix="train without tensor parallelism, or use an element-wise optimizer such as AdamW",
        )
    return FullParameterOptimizer(optimizer, layouts, run)


class FullParameterOptimizer(OwnMethods, torch.optim.Optimizer):
    """An optimizer of shards that steps on full parameters.

    Every rank along an axis over which a parameter is sharded holds the optimizer's state for the full parameter.

    Args:
        optimizer: the optimizer of the shards. State that it has from the start is gathered.
        layout_of: the layout of the full parameter of each shard. The caller may add to it later.
        run: the run.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layout_of: MutableMapping[nn.Parameter, Layout],
        run: Run,
    ) -> None:
        # Like Accelerate's wrapper, this has the interface of an optimizer but does not call its constructor, which
        # would create groups, state and defaults of its own.
        self.optimizer = optimizer
        self._layout_of, self._run = ChainMap({}, layout_of), run
        self._full: dict[nn.Parameter, nn.Parameter] = {}
        self._evaluates = needs_closure(optimizer)
        if recipe_of(optimizer) is not None:  # its constructor needs the parameters that it will update
            self._gather()
        self.inner = twin(optimizer, [self._inner_group(group) for group in optimizer.param_groups])
        share_options(optimizer, self.inner)
        self._translate()
        self._release()
        known = state_of(optimizer)
        for shard in [shard for group in optimizer.param_groups for shard in group["params"] if shard in known]:
            self.put_state(shard, known.pop(shard))
        if recipe_of(optimizer) is not None:
            del optimizer._neuron_accel_recipe  # type: ignore[attr-defined]

    def _full_of(self, shard: nn.Parameter) -> nn.Parameter:
        layout = self._layout_of.get(shard)
        if layout is None or not layout.axes:
            return shard
        if shard not in self._full:
            self._full[shard] = nn.Parameter(shard.new_empty(0), requires_grad=shard.requires_grad)
            self._stand_in(shard).take_attributes(shard)
        return self._full[shard]

    def _stand_in(self, shard: nn.Parameter) -> StandIn:
        def full(value: torch.Tensor) -> torch.Tensor:
            return full_tensor(value, self._layout_of[shard], self._run)

        return StandIn(self._full[shard], full)

    def _translate(self) -> None:
        """Adds the full parameters to what the optimizer stores by shard."""
        translate(self.inner, {shard: [self._stand_in(shard)] for shard in self._full})

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._full_of(shard) for shard in group["params"]]}

    def _gather(self) -> None:
        for group in self.optimizer.param_groups:
            for shard in group["params"]:
                full = self._full_of(shard)
                if full is not shard:
                    layout = self._layout_of[shard]
                    full.requires_grad_(shard.requires_grad)
                    self._stand_in(shard).take_attributes(shard)
                    full.data = full_tensor(shard.detach(), layout, self._run)
                    full.grad = None if shard.grad is None else full_tensor(shard.grad, layout, self._run)

    def _scatter(self) -> None:
        """Copies this rank's shard of each full parameter to the sharded parameter. A gradient that the optimizer has
        dropped is dropped."""
        for shard, full in self._full.items():
            if full.grad is None and shard.grad is not None:
                shard.grad = None
            shard.copy_(self._layout_of[shard].shard(full.detach(), self._run.coordinates))

    def _release(self) -> None:
        for full in self._full.values():
            full.data, full.grad = full.new_empty(0), None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the full parameter, by shard."""
        return StateByParameter(self, self._piece_of)

    @state.setter
    def state(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        self.state.replace(state)

    def _learn(self, shards: Sequence[nn.Parameter]) -> None:
        """Adds the layouts of further shards."""
        for shard in shards:
            record = self._run.find_parameter(shard)
            if record is not None and record.layout.axes:
                self._layout_of[shard] = record.layout

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as in torch, and the full parameters of those that are sharded.

        Args:
            param_group: the parameters, as ``"params"``, and options that differ from the defaults.
        """
        self.optimizer.add_param_group(param_group)
        self._learn(self.optimizer.param_groups[-1]["params"])
        self.inner.add_param_group(self._inner_group(self.optimizer.param_groups[-1]))
        share_options(self.optimizer, self.inner)

    def extend_group(self, index: int, shards: Sequence[nn.Parameter]) -> None:
        """Adds further shards to a group."""
        self.optimizer.param_groups[index]["params"].extend(shards)
        self._learn(shards)
        self.inner.param_groups[index]["params"].extend(self._full_of(shard) for shard in shards)
        self._translate()

    def put_state(self, shard: nn.Parameter, entries: Mapping[str, Any]) -> None:
        """Gives the optimizer the state of a shard, which is gathered to that of the full parameter. Collective along
        the axes over which it is sharded."""
        store, key = self.place_of_state(shard)
        if key is shard:
            store[key] = dict(entries)
            return
        layout = self._layout_of[shard]
        store[key] = {
            name: full_tensor(value, layout, self._run)
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == shard.shape
            else value
            for name, value in entries.items()
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of the shards; those of full parameters exist during a step only.

        Args:
            set_to_none: whether gradients become None instead of zeros.
        """
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Performs a step on full parameters. Collective along the axes over which they are sharded."""
        loss, inside = None, self._evaluates
        if closure is not None and not inside:
            with torch.enable_grad():
                loss = closure()

        @torch.no_grad()  # LBFGS calls it with gradients enabled
        def evaluate() -> Any:
            """Calls the user's closure with the weights that the optimizer tries."""
            self._scatter()
            with torch.enable_grad():
                loss = closure()  # type: ignore[misc]
            self._gather()
            return loss

        check_groups(self.optimizer, self.inner)
        self._gather()
        if closure is not None and inside:
            loss = self.inner.step(evaluate, **options)
        else:
            self.inner.step(**options)
        self._scatter()
        self._release()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler checks this attribute
        return loss

    @torch.no_grad()
    def call_own(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Calls a method of the inner optimizer on full parameters. Collective like :meth:`step`."""
        copies = [p for group in self.optimizer.param_groups for p in group["params"] if self._full_of(p) is p]
        parts = [GradientPart(p.grad, ()) for p in copies if p.grad is not None]
        self._run.shared_inputs.add_gradients(global_norm(parts, self._run) if parts else None)  # as after a step
        self._gather()
        with torch.enable_grad():
            result = getattr(self.inner, name)(*arguments, **options)
        self._scatter()
        self._release()
        return result

    def place_of_state(self, shard: nn.Parameter) -> tuple[MutableMapping[torch.Tensor, Any], nn.Parameter]:
        """Returns where the state of a shard is stored: a mapping and the key in it."""
        return state_of(self.inner), self._full_of(shard)

    def state_pieces(self) -> list[StatePiece]:
        """Returns this rank's state, one :class:`StatePiece` for each parameter of the original model."""
        places = [(shard, index) for index, group in enumerate(self.param_groups) for shard in group["params"]]
        return [piece for place in places if (piece := self._piece(*place)) is not None]

    def _piece_of(self, shard: torch.Tensor) -> StatePiece | None:
        groups = enumerate(self.param_groups)
        index = next((i for i, group in groups if any(p is shard for p in group["params"])), None)
        return None if index is None else self._piece(shard, index)  # type: ignore[arg-type]  # it is a parameter

    def _piece(self, shard: nn.Parameter, index: int) -> StatePiece | None:
        record, (store, key) = self._run.find_parameter(shard), self.place_of_state(shard)
        if record is None:
            return None
        whole, stop = key is not shard, shard.numel()
        return StatePiece(
            record=record, parameter=shard, start=0, stop=stop, group=index, whole=whole, key=key, store=store
        )

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Returns the state of the full parameters, which is equal on all ranks along the axes over which they are
        sharded, with the current options."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the full parameters and the options of the groups.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self.inner.load_state_dict(state_dict)
        share_options(self.optimizer, self.inner)

    def __repr__(self) -> str:
        return f"FullParameterOptimizer({self.optimizer!r})"
