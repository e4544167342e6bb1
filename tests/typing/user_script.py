"""A user's script, for mypy, which reads it in ``nox -s lint``: nothing here runs.

What must be accepted stands as it is, with the types that a user sees. What must be refused is marked with the error
that it is; a mark without an error is one itself (``warn_unused_ignores`` in pyproject.toml).
"""

from __future__ import annotations

import accelerate
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, Zero1Plugin


class Net(nn.Module):
    width: int = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


Loader = DataLoader[tuple[torch.Tensor, ...]]


def takes_accelerates(accelerator: accelerate.Accelerator) -> None:
    """Of somebody who does not know this package."""


def trains(data: TensorDataset) -> None:
    accelerator = NeuronAccelerator(
        plugins=[ModelParallelismPlugin(tensor_parallel_size=2), Zero1Plugin()],
        backend="torch",
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
    )
    takes_accelerates(accelerator)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(data, batch_size=4)

    # the names that a loop has used before are given their prepared objects
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert_type(model, Net)
    assert_type(optimizer, torch.optim.AdamW)
    assert_type(loader, Loader)
    assert_type(scheduler, LambdaLR)
    assert_type(model.width, int)

    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss: torch.Tensor = model(batch).mean()
            accelerator.backward(loss, num_items=8)
            assert_type(accelerator.sync_gradients, bool)
            assert_type(accelerator.clip_grad_norm_(model.parameters(), 1.0), torch.Tensor)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert_type(accelerator.gather_for_metrics(loss), torch.Tensor)
    if accelerator.is_main_process:
        accelerator.print("done", accelerator.process_index, accelerator.num_processes)
    assert_type(accelerator.save_state("checkpoint", async_save=True), str)
    assert_type(accelerator.load_state(resume="latest").folder, str | None)


def prepares_any_number(accelerator: NeuronAccelerator, net: Net, sgd: torch.optim.SGD, loader: Loader) -> None:
    assert_type(accelerator.prepare(net), Net)
    assert_type(accelerator.prepare(net, sgd), tuple[Net, torch.optim.SGD])
    assert_type(accelerator.prepare(net, sgd, loader), tuple[Net, torch.optim.SGD, Loader])
    assert_type(accelerator.prepare(loader, net, sgd, net), tuple[Loader, Net, torch.optim.SGD, Net])
    assert_type(
        accelerator.prepare(net, sgd, net, sgd, loader), tuple[Net, torch.optim.SGD, Net, torch.optim.SGD, Loader]
    )
    placed = accelerator.prepare(net, net, net, net, sgd, sgd, device_placement=[True] * 6)
    assert_type(placed, tuple[Net, Net, Net, Net, torch.optim.SGD, torch.optim.SGD])
    accelerator.prepare(net, net, net, net, sgd, sgd, loader)
    assert_type(accelerator.prepare_model(net, evaluation_mode=True), Net)
    assert_type(accelerator.prepare_optimizer(sgd), torch.optim.SGD)
    assert_type(accelerator.prepare_data_loader(loader), Loader)


def exchanges(accelerator: NeuronAccelerator, values: torch.Tensor) -> None:
    assert_type(accelerator.gather(values), torch.Tensor)
    assert_type(accelerator.gather({"loss": values}), dict[str, torch.Tensor])
    assert_type(accelerator.reduce(values, "mean"), torch.Tensor)
    assert_type(accelerator.pad_across_processes(values, dim=1), torch.Tensor)
    assert_type(accelerator.check_trigger(), bool)

    @accelerator.on_main_process
    def report(text: str) -> int:
        return len(text)

    assert_type(report("x"), int)


def misspells(accelerator: NeuronAccelerator, net: Net, sgd: torch.optim.SGD, loss: torch.Tensor) -> None:
    NeuronAccelerator(mixed_precison="bf16")  # type: ignore[call-arg]
    NeuronAccelerator(gradient_accumulation_step=2)  # type: ignore[call-arg]
    NeuronAccelerator(gradient_accumulation_steps="two")  # type: ignore[arg-type]
    NeuronAccelerator(backend="cuda")  # type: ignore[arg-type]
    NeuronAccelerator([Zero1Plugin()])  # type: ignore[call-arg]
    accelerator.backwrd(loss)  # type: ignore[attr-defined]
    accelerator.is_main_proces  # type: ignore[attr-defined]  # noqa: B018
    accelerator.load_state(resume="newest")  # type: ignore[arg-type]
    accelerator.load_state("checkpoint", verfy=False)  # type: ignore[call-arg]
    accelerator.gather_for_metrics(loss, use_gather_objects=True)  # type: ignore[call-overload]
    accelerator.prepare(net, sgd)[1].stepp()  # type: ignore[attr-defined]
    accelerator.prepare_optimizer(net)  # type: ignore[type-var]
    net = accelerator.prepare(sgd)  # type: ignore[assignment]
    Zero1Plugin(overlapp=True)  # type: ignore[call-arg]
