"""Exact steps of optimizers that need full parameters, where ranks hold only shards of them.

LAMB scales by a parameter's norm, Adafactor factors its rows and columns, Muon orthogonalises the matrix: applied to a
shard, each would silently compute something else. So for the duration of a step a rank gathers its parameters, updates
them in full, as do the other ranks that hold shards of them, and keeps its own shard.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.engine.optim.elementwise import is_elementwise, needs_closure
from neuron_accel.engine.optim.twin import StandIn, StatePiece, copy_options, recipe_of, translate, twin
from neuron_accel.engine.plan.plugin import Claim
from neuron_accel.engine.runtime.tensors import full_tensor

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.sharding.layout import Layout


def full_parameter_step(optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
    """``optimizer``, or a wrapper that makes it exact if it needs full parameters and ranks hold shards of some.

    A plugin that owns the optimizer's state handles this itself.
    """
    if run.owner(Claim.OPTIMIZER_STATE) is not None:
        return optimizer
    records = {p: run.find_parameter(p) for group in optimizer.param_groups for p in group["params"]}
    layouts = {p: record.layout for p, record in records.items() if record is not None and record.layout.axes}
    if not layouts or is_elementwise(optimizer):
        return optimizer
    return FullParameterOptimizer(optimizer, layouts, run)


class FullParameterOptimizer(torch.optim.Optimizer):
    """An optimizer of shards that steps on full parameters.

    Every rank along an axis over which a parameter is sharded holds the optimizer's state for the full parameter.

    Args:
        optimizer: holds the shards, and has no state yet.
        layout_of: the layout of each shard's full parameter. Its owner may add to it.
        run: the run.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layout_of: MutableMapping[nn.Parameter, Layout],
        run: Run,
    ) -> None:
        # An optimizer by interface only, like Accelerate's wrapper: see Zero1Optimizer.
        self.optimizer = optimizer
        self._layout_of, self._run = ChainMap({}, layout_of), run
        self._wholes: dict[nn.Parameter, nn.Parameter] = {}
        if recipe_of(optimizer) is not None:  # its constructor needs the parameters that it will update
            self._put_together()
        self.inner = twin(optimizer, [self._inner_group(group) for group in optimizer.param_groups])
        self._translate()
        self._release()
        if recipe_of(optimizer) is not None:
            del optimizer._neuron_accel_recipe  # type: ignore[attr-defined]

    def _whole(self, part: nn.Parameter) -> nn.Parameter:
        layout = self._layout_of.get(part)
        if layout is None or not layout.axes:
            return part
        if part not in self._wholes:
            self._wholes[part] = nn.Parameter(part.new_empty(0), requires_grad=part.requires_grad)
            self._stand_in(part).take_attributes(part)
        return self._wholes[part]

    def _stand_in(self, part: nn.Parameter) -> StandIn:
        def whole(value: torch.Tensor) -> torch.Tensor:
            return full_tensor(value, self._layout_of[part], self._run)

        return StandIn(self._wholes[part], whole)

    def _translate(self) -> None:
        """Translates what the optimizer stores by shard to full parameters."""
        translate(self.inner, {part: [self._stand_in(part)] for part in self._wholes})

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._whole(part) for part in group["params"]]}

    def _put_together(self) -> None:
        for group in self.optimizer.param_groups:
            for part in group["params"]:
                whole = self._whole(part)
                if whole is not part:
                    layout = self._layout_of[part]
                    whole.requires_grad_(part.requires_grad)
                    self._stand_in(part).take_attributes(part)
                    whole.data = full_tensor(part.detach(), layout, self._run)
                    whole.grad = None if part.grad is None else full_tensor(part.grad, layout, self._run)

    def _hand_out(self) -> None:
        """Every rank keeps its own shard."""
        for part, whole in self._wholes.items():
            part.copy_(self._layout_of[part].shard(whole.detach(), self._run.coordinates))

    def _release(self) -> None:
        for whole in self._wholes.values():
            whole.data, whole.grad = whole.new_empty(0), None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def state(self) -> dict[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        """State by shard; it is that of the full parameter."""
        parts = [part for group in self.param_groups for part in group["params"]]
        state: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        state.update({p: self.inner.state[self._whole(p)] for p in parts if self._whole(p) in self.inner.state})
        return state

    def _learn(self, parts: Sequence[nn.Parameter]) -> None:
        """Records the layouts of further shards."""
        for part in parts:
            record = self._run.find_parameter(part)
            if record is not None and record.layout.axes:
                self._layout_of[part] = record.layout

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)
        self._learn(self.optimizer.param_groups[-1]["params"])
        self.inner.add_param_group(self._inner_group(self.optimizer.param_groups[-1]))

    def extend_group(self, index: int, parts: Sequence[nn.Parameter]) -> None:
        """Further shards for a group."""
        self.optimizer.param_groups[index]["params"].extend(parts)
        self._learn(parts)
        self.inner.param_groups[index]["params"].extend(self._whole(part) for part in parts)
        self._translate()

    def put_state(self, part: nn.Parameter, entries: dict[str, Any]) -> None:
        """State of a shard, which becomes that of the full parameter; collective along the axes of its cuts."""
        store, key = self.place_of_state(part)
        if key is part:
            store[key] = entries
            return
        layout = self._layout_of[part]
        store[key] = {
            name: full_tensor(value, layout, self._run)
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == part.shape
            else value
            for name, value in entries.items()
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """One step on full parameters; collective along the axes over which they are sharded."""
        loss, inside = None, needs_closure(self.inner)
        if closure is not None and not inside:
            with torch.enable_grad():
                loss = closure()

        @torch.no_grad()  # LBFGS calls it with gradients on
        def evaluate() -> Any:
            """The user's closure, at the weights that the optimizer tries."""
            self._hand_out()
            with torch.enable_grad():
                loss = closure()  # type: ignore[misc]
            self._put_together()
            return loss

        self._put_together()
        copy_options(self.optimizer, self.inner)
        if closure is not None and inside:
            loss = self.inner.step(evaluate, **options)
        else:
            self.inner.step(**options)
        copy_options(self.inner, self.optimizer)
        self._hand_out()
        self._release()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler looks at it
        return loss

    def place_of_state(self, part: nn.Parameter) -> tuple[MutableMapping[torch.Tensor, dict[str, Any]], nn.Parameter]:
        """Where the state for a shard is stored: a mapping and the key in it."""
        return self.inner.state, self._whole(part)

    def state_pieces(self) -> list[StatePiece]:
        """What this rank holds, in terms of the original model's parameters."""
        pieces = []
        for index, group in enumerate(self.param_groups):
            for part in group["params"]:
                record, (store, key) = self._run.find_parameter(part), self.place_of_state(part)
                if record is not None:
                    pieces.append(
                        StatePiece(
                            record=record,
                            parameter=part,
                            start=0,
                            stop=part.numel(),
                            group=index,
                            whole=key is not part,
                            key=key,
                            store=store,
                        )
                    )
        return pieces

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """State of the full parameters, equal on every rank along the axes of their cuts; options as they are now."""
        copy_options(self.optimizer, self.inner)
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        copy_options(self.inner, self.optimizer)

    def __repr__(self) -> str:
        return f"FullParameterOptimizer({self.optimizer!r})"
