"""The optimizer that ``prepare`` returns under ZeRO-1.

Outwardly it is the user's optimizer: the same groups with the model's parameters, which schedulers edit. Inwardly, a
twin of it, of the same class and with the same hyper-parameters, updates this rank's pieces only (Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.engine.errors import ParameterError, UsageError
from neuron_accel.engine.gradients import BackwardWatcher, make_buckets, used_anywhere
from neuron_accel.engine.norms import GradientPart, clip_coefficient, global_norm
from neuron_accel.strategies.zero1.partition import Partition
from neuron_accel.strategies.zero1.shards import BucketShard, ShardPiece

if TYPE_CHECKING:
    from neuron_accel.engine.run import PreparedModel, Run


class Zero1Optimizer(torch.optim.Optimizer):
    """Steps this rank's share of an optimizer's parameters.

    Args:
        optimizer: the user's optimizer, holding the rewritten parameters.
        run: the run.
        partition: how a bucket is divided, :func:`~.partition.even` or :func:`~.partition.whole`.
        keep_shapes: whether pieces have the shape of their parameter.
        optimizer_dtype: dtype of the master weights and the optimizer's state.
        bucket_cap_mb: size of the buckets in MiB.
        max_norm: gradients are clipped to this global norm at every step; None: only when asked.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run: Run,
        *,
        partition: Callable[..., Partition],
        keep_shapes: bool,
        optimizer_dtype: torch.dtype,
        bucket_cap_mb: float,
        max_norm: float | None,
    ) -> None:
        # Like Accelerate's own wrapper, this is an Optimizer by interface: groups, state and defaults are those of the
        # optimizers inside, so the base class's constructor, which would make its own, is not run.
        self.optimizer = optimizer
        self._run, self._max_norm = run, max_norm
        self._group = run.group(*run.mesh.gradient_axes)
        self._models = self._models_of(optimizer)
        records = [self._record(p) for group in optimizer.param_groups for p in group["params"]]
        ordered = self._in_model_order([r for r in records if r.current.requires_grad])
        self.shards = [
            BucketShard(
                bucket=bucket,
                partition=partition([p.numel() for p in bucket.parameters], self._group.size),
                run=run,
                group=self._group,
                optimizer_dtype=optimizer_dtype,
                keep_shapes=keep_shapes,
            )
            for bucket in make_buckets(ordered, int(bucket_cap_mb * (1 << 20)))
        ]
        self._pieces: dict[nn.Parameter, list[ShardPiece]] = defaultdict(list)
        for shard in self.shards:
            for piece in shard.pieces:
                self._pieces[piece.parameter].append(piece)
        self.inner = self._twin()
        self._consumed = False
        self.watcher = BackwardWatcher(
            [shard.bucket for shard in self.shards], self._models, ready=self._ready, done=self._done
        )

    # ---- construction ----------------------------------------------------------------------------------------------
    def _record(self, parameter: nn.Parameter) -> Any:
        record = self._run.find_parameter(parameter)
        if record is None:
            raise ParameterError(
                f"A parameter of shape {tuple(parameter.shape)} belongs to no prepared model.",
                fix="prepare the model before, or together with, its optimizer",
            )
        return record

    def _models_of(self, optimizer: torch.optim.Optimizer) -> list[PreparedModel]:
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        return [m for m in self._run.models if any(m.parameters.find(p) is not None for p in mine)]

    def _in_model_order(self, records: list[Any]) -> list[Any]:
        """Backward reaches parameters in the reverse order of the model, whatever the optimizer's groups are."""
        wanted = {record.fqn: record for record in records}
        ordered: dict[int, Any] = {}
        for model in self._models:
            for record in model.parameters:
                if wanted.get(record.fqn) is record:
                    ordered[id(record)] = record
        for record in records:
            ordered.setdefault(id(record), record)
        return list(ordered.values())

    def _twin(self) -> torch.optim.Optimizer:
        """An optimizer like the user's that holds this rank's pieces. It is not built through the constructor, whose
        arguments are unknown for a class of the user's own."""
        outer = self.optimizer
        if any(outer.state.get(p) for group in outer.param_groups for p in group["params"]):
            raise UsageError(
                f"{type(outer).__name__} already has state.",
                why="ZeRO-1 would have to divide it",
                fix="prepare the optimizer before its first step, and load its state afterwards",
            )
        twin = object.__new__(type(outer))
        twin.__dict__.update({k: v for k, v in outer.__dict__.items() if k not in ("step", "state", "param_groups")})
        twin.state = defaultdict(dict)
        twin.param_groups = [
            {**group, "params": [piece.master for p in group["params"] for piece in self._pieces.get(p, ())]}
            for group in outer.param_groups
        ]
        return twin

    # ---- the face of an optimizer ----------------------------------------------------------------------------------
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of this rank's pieces."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UsageError(
            "A parameter group cannot be added to an optimizer that ZeRO-1 has divided.",
            fix="add the group before `prepare`",
        )

    def __repr__(self) -> str:
        return f"Zero1Optimizer({self.optimizer!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients. They are always set to None: the buffers behind them are not kept between steps."""
        for shard in self.shards:
            shard.drop_gradients()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self.watcher.unsynchronised = False
        self._consumed = False

    # ---- gradients -------------------------------------------------------------------------------------------------
    def _ready(self, index: int) -> None:
        self.shards[index].send_gradients()

    def _done(self) -> None:
        used = iter(used_anywhere([flag for s in self.shards for flag in s.used], self._run, self._group))
        for shard in self.shards:
            shard.receive_gradients(
                [next(used) for _ in shard.used],
                1.0 / self._group.size,
                self._run.group(*shard.bucket.partial_axes),
                accumulate=not self._consumed,
            )
        self._consumed = False

    def flush(self) -> None:
        """Completes the reduction of gradients that wait for it."""
        self.watcher.finish()
        if self.watcher.unsynchronised:
            if not all(model.sync_enabled for model in self._models):
                raise UsageError(
                    "An optimizer step inside `no_sync` is not possible under ZeRO-1.",
                    why="a rank has only its share of the optimizer's state and needs the others' gradients",
                    fix="step outside `no_sync`; where ranks are meant to step alone (LocalSGD), train without ZeRO-1",
                )
            self.watcher.flush()

    def gradient_parts(self, parameters: Iterable[nn.Parameter]) -> list[GradientPart]:
        """This rank's pieces of the reduced gradients of ``parameters``, those of other optimizers left out."""
        wanted = set(parameters)
        parts = []
        for shard in self.shards:
            mine = {piece.place.parameter: piece for piece in shard.pieces}
            for index, (parameter, record) in enumerate(
                zip(shard.bucket.parameters, shard.bucket.records, strict=True)
            ):
                if parameter in wanted and shard.used_anywhere[index]:
                    piece = mine.get(index)
                    axes = (*record.layout.axes, *self._run.mesh.gradient_axes)
                    parts.append(GradientPart(piece.master.grad if piece else None, axes, record.layout.replicas))
        return parts

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The reduced gradient of one parameter in its local shape; collective."""
        for shard in self.shards:
            for index, candidate in enumerate(shard.bucket.parameters):
                if candidate is parameter:
                    return shard.gather_gradients()[index]
        return None

    # ---- the step --------------------------------------------------------------------------------------------------
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates this rank's pieces and gathers everybody's.

        Raises:
            UsageError: if a closure is given: it would run a backward pass between reduction and update.
        """
        if closure is not None:
            raise UsageError(
                "ZeRO-1 cannot step with a closure.",
                why="a closure runs forward and backward inside the step, after gradients were reduced",
                fix="run forward and backward before `step()`, or train without ZeRO-1",
            )
        self.flush()
        if self._max_norm is not None:
            parts = self.gradient_parts(p for group in self.param_groups for p in group["params"])
            scale_parts(parts, clip_coefficient(global_norm(parts, self._run), self._max_norm))
        self._copy_options(self.optimizer, self.inner)
        self.inner.step()
        self._copy_options(self.inner, self.optimizer)
        for finish in [shard.send_weights() for shard in self.shards]:
            finish()
        self._consumed = True
        # A scheduler warns if the optimizer it was built with never steps; it looks at this attribute.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    @staticmethod
    def _copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
        for theirs, mine in zip(source.param_groups, target.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """State of this rank's pieces only."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave on the same rank of the same mesh."""
        self.inner.load_state_dict(state_dict)
        self._copy_options(self.inner, self.optimizer)

    def close(self) -> None:
        """Stops watching backward passes."""
        self.watcher.close()


def scale_parts(parts: Iterable[GradientPart], coefficient: torch.Tensor) -> None:
    """Multiplies this rank's pieces of gradients in place."""
    tensors = [part.tensor for part in parts if part.tensor is not None]
    if tensors:
        torch._foreach_mul_(tensors, coefficient.to(tensors[0].dtype))
