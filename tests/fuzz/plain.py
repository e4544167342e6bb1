"""One process: what a program means, in nothing but PyTorch.

It has the methods of an accelerator that generated programs call. A batch is what all data-parallel ranks see together.
What is defined for each rank by itself (statistics of a batch, masks of dropout) is computed for each rank's rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Process:
    """Trains in this process.

    Args:
        ranks: number of data-parallel ranks whose training this is to equal.
        options: those of the accelerator; ``backend``: of the ranks.
        noise: relative size of what is added to weights when they are prepared, to see what rounding does.
        seed: of what is added.
    """

    is_main_process = True
    device = torch.device("cpu")

    def __init__(self, ranks: int, options: dict[str, Any], noise: float = 0.0, seed: int = 1) -> None:
        self.ranks, self.noise, self.seed = ranks, noise, seed
        self.steps_per_update = options.get("gradient_accumulation_steps", 1)
        self.on_xla = options.get("backend") == "xla"
        names = {"bf16": torch.bfloat16, "fp16": torch.float16 if self.on_xla else None}  # none on the CPU
        self.autocasts = names.get(options.get("mixed_precision"))
        self.splits = options.get("split_batches", False)
        self.dispatches = options.get("dispatch_batches")
        self.scheduler_follows = options.get("step_scheduler_with_optimizer", True)
        self.sync_gradients, self.step, self.items = True, 0, 0.0
        self.uneven = self.stepped = False
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Scheduler] = []
        self.loaders: list[Loader] = []
        self.saved: Any = None

    # ---- prepare -----------------------------------------------------------------------------------------------------
    def prepare(self, *values: Any) -> Any:
        prepared = tuple(self._prepare(value) for value in values)
        return prepared if len(prepared) > 1 else prepared[0]

    def _prepare(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self.prepare_model(value)
        for kind, wrapper, kept in (
            (torch.optim.Optimizer, Optimizer, self.optimizers),
            (torch.optim.lr_scheduler.LRScheduler, Scheduler, self.schedulers),
            (torch.utils.data.DataLoader, Loader, self.loaders),
        ):
            if isinstance(value, kind):
                wrapped = wrapper(value, self)
                kept.append(wrapped)
                return wrapped
        raise TypeError(type(value))

    def prepare_model(self, model: nn.Module, evaluation_mode: bool = False) -> nn.Module:
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                module.__class__ = type("BatchNormByRank", (BatchNormByRank, type(module)), {})
                module.ranks, module.biased = self.ranks, self.on_xla
            elif isinstance(module, nn.Dropout):
                module.__class__ = DropoutByRank
                module.ranks = self.ranks
        if self.noise:
            draw = torch.Generator().manual_seed(2 + self.seed)
            with torch.no_grad():
                for p in model.parameters():
                    if p.is_floating_point():
                        p.mul_(1 + self.noise * torch.randn(p.shape, generator=draw).to(p.dtype))
        if self.autocasts:
            inner = model.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                with torch.autocast("cpu", self.autocasts):
                    return _in_fp32(inner(*args, **kwargs))

            model.forward = forward
        self.models.append(model)
        return model

    def full_weights(self, model: nn.Module) -> Any:
        return nullcontext()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    # ---- a step ------------------------------------------------------------------------------------------------------
    @contextmanager
    def join_uneven_inputs(self, models: Any, even_batches: bool) -> Iterator[None]:
        """Loaders yield the batches of ranks one after another, and say which is the last of a step."""
        self.uneven = True
        yield
        self.uneven = False

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        if self.uneven:
            pass
        elif any(loader.at_end for loader in self.loaders if loader.active):
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.steps_per_update == 0
        yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        yield

    def autocast(self) -> Any:
        return torch.autocast("cpu", self.autocasts) if self.autocasts else nullcontext()

    def backward(self, loss: torch.Tensor, *, num_items: Any = None, **kwargs: Any) -> None:
        if num_items is None:
            (loss / self.steps_per_update / (self.ranks if self.uneven else 1)).backward(**kwargs)
        else:
            self.items += float(num_items)
            (loss * float(num_items)).backward(**kwargs)

    def settle(self) -> None:
        """Divides the gradients of a step by the number of items that were seen."""
        if self.items:
            for model in self.models:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= self.items
            self.items = 0.0

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        if not self.sync_gradients:
            return torch.tensor(float("nan"))
        self.settle()
        return nn.utils.clip_grad_norm_(list(parameters), max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, value: float) -> None:
        if self.sync_gradients:
            self.settle()
            nn.utils.clip_grad_value_(list(parameters), value)

    # ---- values ------------------------------------------------------------------------------------------------------
    def reduce(self, value: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return value

    def gather_for_metrics(self, value: torch.Tensor) -> torch.Tensor:
        loader = next(loader for loader in self.loaders if loader.active)
        return value[: loader.real] if loader.at_end else value

    def get_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def get_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        self.settle()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    # ---- state -------------------------------------------------------------------------------------------------------
    def save_state(self, folder: str) -> None:
        everything = [*self.models, *self.optimizers, *self.schedulers]
        self.saved = (
            [copy.deepcopy(value.state_dict()) for value in everything],
            [loader.position for loader in self.loaders],
            torch.get_rng_state(),
            self.step,
        )

    def load_state(self, folder: str) -> None:
        states, positions, rng, self.step = self.saved
        everything = [*self.models, *self.optimizers, *self.schedulers]
        for value, state in zip(everything, states, strict=True):
            value.load_state_dict(copy.deepcopy(state))
        for loader, position in zip(self.loaders, positions, strict=True):
            loader.resume(*position)
        torch.set_rng_state(rng)

    def end_training(self) -> None:
        pass


class Optimizer:
    """Steps and zeroes gradients with the last micro-batch of a step only."""

    def __init__(self, optimizer: torch.optim.Optimizer, process: Process) -> None:
        self.optimizer, self._process = optimizer, process

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if self._process.sync_gradients:
            self._process.settle()
            self.optimizer.step(closure)
            self._process.stepped = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """With uneven inputs some batches of a step are another rank's first ones; programs zero before each."""
        if self._process.stepped if self._process.uneven else self._process.sync_gradients:
            self.optimizer.zero_grad(set_to_none)
            self._process.stepped = False


class Scheduler:
    """Advances once for every data-parallel rank, as Accelerate's does; one that counts metrics, once for each."""

    def __init__(self, scheduler: Any, process: Process) -> None:
        self.scheduler, self._process = scheduler, process

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def step(self, *args: Any) -> None:
        process = self._process
        if not process.scheduler_follows:
            self.scheduler.step(*args)
        elif process.sync_gradients:
            counts_metrics = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            for _ in range(1 if process.splits or counts_metrics else process.ranks):
                self.scheduler.step(*args)


class Loader:
    """The batches of all ranks together; a ragged last one is filled up from the first ones, as Accelerate does."""

    def __init__(self, loader: Any, process: Process) -> None:
        self.loader, self._process = loader, process
        self.active, self.at_end, self.real, self.position = False, False, 0, (0, None)
        self._skip, self._rng = 0, None

    def __len__(self) -> int:
        return len(list(self._batches()))

    def resume(self, done: int, rng: Any) -> None:
        self._skip, self._rng = done, rng

    def _generator(self) -> torch.Generator | None:
        return self.loader.generator

    def __iter__(self) -> Iterator[Any]:
        if self._process.uneven:
            yield from self._one_after_another()
            return
        skip, self._skip = self._skip, 0
        generator = self._generator()
        if generator is not None and self._rng is not None:
            generator.set_state(self._rng)
        self._rng = None
        begun = None if generator is None else generator.get_state()
        batches = list(self._batches())
        self.active = True
        for index, (batch, real) in enumerate(batches):
            if index >= skip:
                self.at_end, self.real, self.position = index == len(batches) - 1, real, (index + 1, begun)
                yield batch
        self.active, self.at_end = False, False
        self.position = (0, None)

    def _batches(self) -> Iterator[tuple[Any, int]]:
        """Batches, and how many of their rows are no repetition."""
        given = list(self.loader)
        ranks, splits = self._process.ranks, self._process.splits
        if not given or ranks == 1:
            yield from ((batch, _rows(batch)) for batch in given)
            return
        size = self.loader.batch_size or self.loader.batch_sampler.batch_size
        full = size * (1 if splits else ranks)
        together = 1 if splits else ranks
        first = _joined(given[:together])
        for start in range(0, len(given), together):
            batch = _joined(given[start : start + together])
            real = _rows(batch)
            if real < full and self._drops_last():
                return
            filled = -(-real // ranks) * ranks if self._dispatched else full
            while _rows(batch) < filled:
                batch = _joined([batch, first])
            yield _cut(batch, filled), real

    def _one_after_another(self) -> Iterator[Any]:
        """The batches of every rank by themselves. A step consists of as many of each rank as are accumulated, or of
        those that it has left."""
        given, process = list(self.loader), self._process
        if process.splits:
            share = (self.loader.batch_size or self.loader.batch_sampler.batch_size) // process.ranks
            cut = [_sliced(batch, r * share, (r + 1) * share) for batch in given for r in range(process.ranks)]
            by_rank = [[b for b in cut[r :: process.ranks] if _rows(b)] for r in range(process.ranks)]
        else:
            by_rank = [given[r :: process.ranks] for r in range(process.ranks)]
        together = process.steps_per_update
        for start in range(0, max(map(len, by_rank)), together):
            batches = [batch for mine in by_rank for batch in mine[start : start + together]]
            for index, batch in enumerate(batches):
                process.sync_gradients = index == len(batches) - 1
                yield batch

    @property
    def _dispatched(self) -> bool:
        """Whether one process reads for all, which fills up to equal numbers of rows only."""
        wanted = self._process.dispatches
        return isinstance(self.loader.dataset, torch.utils.data.IterableDataset) if wanted is None else wanted

    def _drops_last(self) -> bool:
        return bool(self.loader.drop_last or getattr(self.loader.batch_sampler, "drop_last", False))


def _rows(batch: Any) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


def _joined(batches: list[Any]) -> Any:
    if isinstance(batches[0], dict):
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    return [torch.cat(values) for values in zip(*batches, strict=True)]


def _cut(batch: Any, rows: int) -> Any:
    return _sliced(batch, 0, rows)


def _sliced(batch: Any, start: int, end: int) -> Any:
    if isinstance(batch, dict):
        return {name: value[start:end] for name, value in batch.items()}
    return [value[start:end] for value in batch]


def _in_fp32(output: Any) -> Any:
    """What a model gives back under autocast, in fp32, as from a prepared one."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
    for name, value in list(output.items()):
        if isinstance(value, torch.Tensor):
            output[name] = _in_fp32(value)
    return output


class BatchNormByRank:
    """Statistics of each rank's rows; running ones are the first rank's. torch_xla keeps the biased variance of a batch
    where other devices keep the unbiased one."""

    ranks: int
    biased: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)  # type: ignore[misc]
        first, *others = x.chunk(self.ranks)
        before = self.running_var.clone()  # type: ignore[attr-defined]
        outputs = [super().forward(first)]  # type: ignore[misc]
        if self.biased:
            variance = first.detach().transpose(0, 1).flatten(1).var(1, correction=0)
            self.running_var = before.lerp(variance, self.momentum)  # type: ignore[attr-defined]
        weight, bias, eps = self.weight, self.bias, self.eps  # type: ignore[attr-defined]
        outputs += [F.batch_norm(part, None, None, weight, bias, True, 0.0, eps) for part in others]
        return torch.cat(outputs)


class DropoutByRank(nn.Dropout):
    """Ranks that seed alike draw the same mask, each for its rows."""

    ranks: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.p:
            return x
        mask = F.dropout(torch.ones_like(x[: len(x) // self.ranks]), self.p)
        return x * mask.repeat(self.ranks, *[1] * (x.ndim - 1))
