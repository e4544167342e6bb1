"""Plain data parallelism: every rank trains the same parameters on its own samples, gradients are averaged.

The default owner of gradient reduction and clipping. Gradients travel in buckets while backward still runs, as in
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (Li et al., VLDB 2020).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from neuron_accel.contract import (
    BackwardWatcher,
    Bucket,
    Claim,
    ConfigurationError,
    FlatGradients,
    Phase,
    PluginSpec,
    StrategyPlugin,
    broadcast_tensors,
    clip_coefficient,
    global_norm,
    make_buckets,
    whole_gradients,
)

if TYPE_CHECKING:
    from neuron_accel.contract import Group, ParameterRecord, Pending, PreparedModel, Run


@dataclass(frozen=True, kw_only=True)
class DataParallelPlugin(StrategyPlugin):
    """Averages gradients over data-parallel ranks.

    Args:
        bucket_cap_mb: size of the buckets in MiB. Smaller ones start earlier, larger ones cost fewer messages.
        broadcast_buffers: whether buffers that training changes (running statistics) follow those of the first rank
            before every training forward, as in DistributedDataParallel.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="data_parallel",
        phase=Phase.GRADIENTS,
        claims=frozenset({Claim.GRADIENT_REDUCTION, Claim.GRADIENT_CLIPPING}),
    )

    bucket_cap_mb: float = 25.0
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        if self.bucket_cap_mb <= 0:
            raise ConfigurationError(f"bucket_cap_mb is {self.bucket_cap_mb}; it must be positive.")

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        if self.owns_reduction(run):
            run.state(self).setdefault("reducers", []).append(GradientAverager(model, run, self.bucket_cap_mb))
            if self.broadcast_buffers:
                self._follow_buffers(model.module, run)

    def owns_reduction(self, run: Run) -> bool:
        return run.owner(Claim.GRADIENT_REDUCTION) is self

    def _follow_buffers(self, model: nn.Module, run: Run) -> None:
        persistent = model.state_dict(keep_vars=True)
        buffers = [b for name, b in model.named_buffers() if name in persistent]
        group = run.group(*run.mesh.gradient_axes)
        if not buffers or group.size == 1:
            return

        def send() -> None:
            current = [b for n, b in model.named_buffers() if n in persistent]
            broadcast_tensors(current, run, group, run.company.leader)

        action = run.company.register("a training forward", send)

        def follow(module: nn.Module, _inputs: Any) -> None:
            if module.training and torch.is_grad_enabled():
                action()
                send()

        run.state(self).setdefault("hooks", []).append(model.register_forward_pre_hook(follow))

    def after_reshape(self, model: PreparedModel | None, run: Run) -> None:
        for reducer in self._reducers(run):
            reducer.again()

    def before_backward(self, loss: torch.Tensor, run: Run) -> torch.Tensor:
        if run.owner(Claim.BACKWARD) is None:
            for reducer in self._reducers(run):
                reducer.set_aside()
        return loss

    def after_backward(self, run: Run) -> None:
        for reducer in self._reducers(run):
            reducer.watcher.finish()
            reducer.put_back()

    def before_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        self._flush(run)

    def clip_grad_norm(
        self, parameters: list[nn.Parameter], max_norm: float, norm_type: float, run: Run
    ) -> torch.Tensor:
        self._flush(run)
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = global_norm(whole_gradients(parameters, run), run, norm_type)
        if gradients:
            torch._foreach_mul_(gradients, clip_coefficient(norm, max_norm).to(gradients[0].device))
        return norm

    def clip_grad_value(self, parameters: list[nn.Parameter], clip_value: float, run: Run) -> None:
        self._flush(run)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.clamp_(-clip_value, clip_value)

    def scale_gradients(self, parameters: list[nn.Parameter], factor: torch.Tensor, run: Run) -> None:
        self._flush(run)
        super().scale_gradients(parameters, factor, run)

    def full_gradient(self, parameter: nn.Parameter, run: Run) -> torch.Tensor | None:
        for reducer in self._reducers(run):
            reducer.flush()
        return parameter.grad

    def teardown(self, run: Run) -> None:
        for reducer in self._reducers(run):
            reducer.watcher.close()
        for handle in run.state(self).pop("hooks", []):
            handle.remove()
        run.state(self).clear()

    def _flush(self, run: Run) -> None:
        """Before gradients are used for a step."""
        for reducer in self._reducers(run):
            reducer.flush()
            reducer.flush_replica()

    def _reducers(self, run: Run) -> list[GradientAverager]:
        return run.state(self).get("reducers", [])


class GradientAverager:
    """Averages the gradients of one model over the mesh's gradient axes; sums those that are partial over others.

    After a synchronising backward pass ``parameter.grad`` is the average, as a view into its bucket.
    """

    def __init__(self, model: PreparedModel, run: Run, bucket_cap_mb: float) -> None:
        self._model, self._run, self._cap_bytes = model, run, int(bucket_cap_mb * (1 << 20))
        self._data_group = run.group(*run.mesh.gradient_axes)
        self._pending: list[tuple[int, list[bool], Pending]] = []
        self._left: set[torch.Tensor] = set()
        self._before: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._action = run.company.register(
            "a backward pass", lambda *state: self.watcher.take_part(*state), settle=lambda: self.flush()
        )
        self._watch(agreed=False)

    def _watch(self, *, agreed: bool) -> None:
        model = self._model
        # Where reading a value would stall the device, what this rank knows of its gradients is taken for all.
        lazy = self._run.backend.is_lazy
        self._buckets: list[Bucket] = []
        self._memory: list[FlatGradients] | None = None if lazy else []
        self.watcher = BackwardWatcher(
            [r for r in model.parameters if r.current is not None and r.current not in self._left],
            self._admit,
            run=self._run,
            group=self._data_group,
            synchronises=lambda: model.synchronises,
            driven=lambda: model.in_backward,
            ready=self._ready,
            done=self._done,
            overlap=not lazy,  # nothing runs before the graph is complete, and then the compiler decides
            action=self._action,
            take=None if lazy else self._take,
            agreed=agreed,
        )

    def _admit(self, records: list[ParameterRecord]) -> list[Bucket]:
        """Buckets for parameters that begin to train."""
        buckets = [b for b in make_buckets(records, self._cap_bytes) if self._group(b).size > 1]
        self._buckets += buckets
        if self._memory is not None:
            reads = self._run.backend.reads_are_free
            self._memory += [FlatGradients(bucket, flags=reads) for bucket in buckets]
        return buckets

    def again(self) -> None:
        """Begins anew with the parameters as they are now."""
        self.watcher.close()
        self._watch(agreed=True)

    def leave(self, parameters: Iterable[torch.Tensor]) -> None:
        """Leaves some parameters to somebody else."""
        new = set(parameters) - self._left
        self._left |= new
        if any(record.current in new for record in self._model.parameters):
            self.again()

    def set_aside(self) -> None:
        """A pass begins that will be reduced. Gradients of passes before it, where a loop does not zero them, are sums
        already: averaged again they stay what they are, but summed again they would be multiplied."""
        if not self._model.synchronises:
            return
        for index, bucket in enumerate(self._buckets):
            if self._run.group(*bucket.partial_axes).size > 1 and not self.watcher.owes(index):
                for parameter in bucket.parameters:
                    if parameter.requires_grad and parameter.grad is not None:
                        self._before[parameter], parameter.grad = parameter.grad.clone(), None

    def put_back(self) -> None:
        """The pass is over."""
        before, self._before = self._before, {}
        for parameter, gradient in before.items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _group(self, bucket: Bucket) -> Group:
        return self._run.group(*self._run.mesh.gradient_axes, *bucket.partial_axes)

    def _take(self, index: int, position: int) -> None:
        assert self._memory is not None
        self._memory[index].take(position, 1 / self._data_group.size)

    def _ready(self, index: int) -> None:
        self._send(index, self._group(self._buckets[index]), self._data_group.size)

    def _send(self, index: int, group: Group, ranks: int) -> None:
        """Starts the sum over ``group`` that makes an average over ``ranks`` of a bucket's gradients."""
        if self._memory is None:
            self._average(self._buckets[index], group, ranks)
            return
        flat, used = self._memory[index].collect(1 / ranks)
        self._pending.append((index, used, self._run.backend.start_all_reduce(flat, group)))

    def _average(self, bucket: Bucket, group: Group, ranks: int) -> None:
        """The same where everything happens later anyway."""
        used = [p.grad is not None for p in bucket.parameters]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket.parameters]
        averages = self._run.backend.all_reduce_together(gradients, group, 1 / ranks)
        for parameter, is_used, average in zip(bucket.parameters, used, averages, strict=True):
            parameter.grad = average if is_used else None

    def _done(self) -> None:
        """Waits for the averages and hands them out."""
        pending, self._pending = self._pending, []
        for index, used, work in pending:
            assert self._memory is not None
            memory = self._memory[index]
            flat = work.wait()
            anywhere = memory.used_anywhere(flat, used)
            for parameter, part, is_used in zip(
                self._buckets[index].parameters, memory.parts(flat), anywhere, strict=True
            ):
                if is_used:
                    parameter.grad = part
        self.put_back()
        if self.watcher.is_mixed and not self.watcher.unsynchronised:
            self.again()  # else what is frozen would travel along, and hold its neighbours up

    def flush(self) -> None:
        """Reduces what backward passes under ``no_sync`` left behind, unless ``no_sync`` still holds."""
        self.watcher.finish()
        if self._model.sync_enabled:
            self.watcher.flush()

    def flush_replica(self) -> None:
        """A step inside ``no_sync``: ranks that see different samples go their own ways, but those that hold one copy
        of the model between them still sum what each has of its gradients."""
        if self._model.sync_enabled:
            return
        self.watcher.follow(owed=True)
        if not self.watcher.unsynchronised:
            return
        mesh = self._run.mesh
        within = [axis for axis in mesh.gradient_axes if axis not in mesh.data_axes]
        groups = [self._run.group(*within, *bucket.partial_axes) for bucket in self._buckets]
        if all(group.size == 1 for group in groups):
            return
        for index, group in enumerate(groups):
            if self.watcher.owes(index):
                self._send(index, group, self._run.group(*within).size)
        self.watcher.forget()
        self._done()
