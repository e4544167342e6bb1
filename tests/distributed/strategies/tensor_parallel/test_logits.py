"""Sharded logits look like whole ones, and gather themselves exactly where they must."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.nn import functional as F

from neuron_accel.errors import UsageError
from neuron_accel.strategies.tensor_parallel.vocabulary import Vocabulary, VocabularyShard
from neuron_accel.testing.ranks import run_ranks
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import make_run

LOCAL = {
    "float": lambda x: x.double().float(),
    "to": lambda x: x.to(torch.float64),
    "to bfloat16 and back": lambda x: x.to(torch.bfloat16).float(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "divide": lambda x: x / 3,
    "multiply": lambda x: 2 * x * torch.tensor(0.5),
    "soft cap": lambda x: torch.tanh(x / 30.0) * 30.0,
    "negate": lambda x: -x,
    "view": lambda x: x.view(-1, 11),
    "view to the same": lambda x: x.view(2, 5, -1),
    "reshape": lambda x: x.reshape((10, 11)),
    "split a dim": lambda x: x.view(2, 1, 5, 11),
    "flatten": lambda x: x.flatten(0, 1),
    "shift": lambda x: x[..., :-1, :],
    "last token": lambda x: x[:, -1],
    "last token, last dim whole": lambda x: x[:, -1, :],
    "first sequence": lambda x: x[0],
    "new dim": lambda x: x[None],
    "mask": lambda x: x[torch.tensor([[1, 0, 1, 0, 1], [0, 0, 0, 1, 1]], dtype=torch.bool)],
    "index": lambda x: x[torch.tensor([1, 0])],
    "index two dims": lambda x: x[torch.arange(2), torch.tensor([4, 2])],
}
GATHERED = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: F.log_softmax(x, -1),
    "add": lambda x: x + 1,
    "sum": lambda x: x.sum(),
    "scale by a vector": lambda x: x * torch.arange(11.0),
    "flatten everything": lambda x: x.flatten(),
    "view across": lambda x: x.view(11, 10),
    "transpose": lambda x: x.transpose(1, 2),
    "one id": lambda x: x[..., 3],
    "some ids": lambda x: x[:, :, 2:5],
    "new last dim": lambda x: x[..., None],
    "new last dim, all named": lambda x: x[:, :, :, None],
    "mask of everything": lambda x: x[torch.ones(2, 5, 11, dtype=torch.bool)],
    "compare": lambda x: x > 0,
    "stack": lambda x: torch.stack([x, x]),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "item": lambda x: torch.tensor(x[0, 0, 0].item()),
    "iterate": lambda x: list(x.detach().sum(0))[1],
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach() + 0)),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(())),
    "class weights": lambda x: F.cross_entropy(x.view(-1, 11), torch.arange(10), weight=torch.arange(11.0)),
    "class probabilities": lambda x: F.cross_entropy(x.view(-1, 11), torch.full((10, 11), 1 / 11)),
    "classes in the middle": lambda x: F.cross_entropy(x.transpose(1, 2), torch.ones(2, 5, dtype=torch.long)),
}
PARALLEL = {
    "loss": lambda x: F.cross_entropy(x.view(-1, 11), torch.arange(10)),
    "smoothed": lambda x: F.cross_entropy(x.view(-1, 11), torch.arange(10), label_smoothing=0.1),
    "module": lambda x: torch.nn.CrossEntropyLoss(ignore_index=3)(x.view(-1, 11), torch.arange(10)),
    "one token": lambda x: F.cross_entropy(x[0, 0], torch.tensor(4)),
}


class _Square(torch.autograd.Function):
    """An operation that never asks a tensor's class."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x + 0)
        return x * x + 0

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def _shard() -> tuple[torch.Tensor, torch.Tensor, VocabularyShard]:
    run = make_run(degree=2)
    vocabulary = Vocabulary(size=11, backend=run.backend, group=run.group("tp"))
    whole = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0), requires_grad=True)
    local = vocabulary.shard(whole.detach()).clone().requires_grad_()
    return whole, local, VocabularyShard.of(local, vocabulary)


def _check(name: str, function, kind: type) -> None:
    whole, local, shard = _shard()
    expected, actual = function(whole), function(shard)
    assert type(actual) is kind, name
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    torch.testing.assert_close(actual.full_tensor() if kind is VocabularyShard else actual, expected)
    assert actual.requires_grad == expected.requires_grad, name
    if expected.requires_grad:
        scale = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
        (expected * scale).sum().backward()
        (actual * scale).sum().backward()
        wanted = shard.vocabulary.shard(whole.grad)
        torch.testing.assert_close(local.grad, wanted, msg=lambda text: f"{name}: {text}")


def _operations() -> None:
    for name, function in LOCAL.items():
        _check(name, function, VocabularyShard)
    for name, function in {**GATHERED, **PARALLEL}.items():
        _check(name, function, torch.Tensor)
    _check("custom autograd function", _Square.apply, torch.Tensor)


def test_operations_agree_with_full_logits() -> None:
    run_ranks(_operations, 2)


def _traffic() -> dict[str, list[str]]:
    result = {}
    for name, function in {**LOCAL, **PARALLEL, "repr": repr, "shape": lambda x: (x.shape, len(x), x.ndim)}.items():
        shard = _shard()[2]
        with shard.vocabulary.backend.record() as traffic:
            function(shard)
        result[name] = [transfer.op for transfer in traffic.transfers]
    shard = _shard()[2]
    with shard.vocabulary.backend.record() as traffic:
        _ = shard.argmax(-1), shard.sum(), shard + 1
    result["three uses"] = [transfer.op for transfer in traffic.transfers]
    return result


def test_only_the_operations_that_need_it_communicate() -> None:
    for result in run_ranks(_traffic, 2):
        assert result.pop("three uses") == ["all_gather"]
        for name in PARALLEL:
            assert result.pop(name) == ["all_reduce", "all_reduce"], name
        assert not any(result.values()), result


def _refusals() -> None:
    shard = _shard()[2]
    for change in (
        lambda: shard.mul_(2),
        lambda: shard.__setitem__(0, 1.0),
        lambda: shard.masked_fill_(shard > 0, 0.0),
        lambda: shard.retain_grad(),
    ):
        with pytest.raises(UsageError, match="does not hold in full"):
            change()


def test_what_would_be_lost_is_refused() -> None:
    run_ranks(_refusals, 2)


def _no_grad_first() -> None:
    """Logits gathered without gradient first are gathered again when a gradient is wanted."""
    _, local, shard = _shard()
    with torch.no_grad():
        assert not shard.sum().requires_grad
    shard.sum().backward()
    assert local.grad is not None


def test_gathering_remembers_whether_a_gradient_was_wanted() -> None:
    run_ranks(_no_grad_first, 2)


def _other_collectives() -> None:
    whole, _, shard = _shard()
    for tensor in (shard, shard.detach()):
        result = torch.empty(2, *whole.shape)
        torch.distributed.all_gather_into_tensor(result.view(4, 5, 11), tensor)
        torch.testing.assert_close(result, torch.stack([whole, whole]).detach())


def test_torch_collectives_receive_full_logits() -> None:
    run_ranks(_other_collectives, 2)
