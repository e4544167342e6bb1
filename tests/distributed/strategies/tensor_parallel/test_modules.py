"""Each sharded module and function against its whole counterpart: outputs, input gradients and weight gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.engine.sharding.layout import Cut, Layout
from neuron_accel.strategies.tensor_parallel.embedding import parallel_embedding, parallel_head
from neuron_accel.strategies.tensor_parallel.linear import parallel_linear
from neuron_accel.strategies.tensor_parallel.tp_region import SequenceFlow, TpRegion
from neuron_accel.strategies.tensor_parallel.vocabulary import Vocabulary, VocabularyShard, cross_entropy
from neuron_accel.testing.ranks import run_ranks
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import make_run, randomise

DEGREES = pytest.mark.parametrize("degree", [2, 4])


def _tp_region(degree: int, *, sequence: bool = False, length: int = 0) -> TpRegion:
    run = make_run(degree=degree)
    tp_region = TpRegion(run.backend, run.group("tp"))
    if sequence:
        tp_region.flow = SequenceFlow(tp_region.backend, tp_region.group)
        tp_region.flow._length = length
    return tp_region


def _cut(module: nn.Module, name: str, dim: int, degree: int, index: int, **options) -> Layout:
    """Cuts one parameter of ``module`` in place."""
    whole = getattr(module, name)
    layout = Layout(
        shape=tuple(whole.shape),
        dtype="float32",
        cuts=(Cut(dim=dim, axis="tp", degree=degree, size=whole.shape[dim], **options),),
    )
    module.register_parameter(name, nn.Parameter(layout.shard(whole.detach(), {"tp": index})))
    return layout


def _same_shard(layout: Layout, actual: torch.Tensor, whole: torch.Tensor, index: int) -> None:
    torch.testing.assert_close(actual, layout.shard(whole, {"tp": index}), rtol=1e-5, atol=1e-6)


def _linear_kinds() -> dict[str, nn.Module]:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    kinds = {
        "linear": (nn.Linear(8, 24), nn.Linear(24, 8)),
        "without bias": (nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)),
        "conv1d": (Conv1D(24, 8), Conv1D(8, 24)),
    }
    return {name: nn.Sequential(*(randomise(m) for m in modules)) for name, modules in kinds.items()}


def _check_region(degree: int, sequence: bool, length: int) -> None:
    """A column-wise and a row-wise layer with a nonlinearity in between, from entry to exit."""
    for name, whole in _linear_kinds().items():
        tp_region = _tp_region(degree, sequence=sequence, length=length)
        index = tp_region.group.index
        column, row = (
            parallel_linear(copy.deepcopy(m), kind, tp_region)
            for m, kind in zip(whole, ["colwise", "rowwise"], strict=True)
        )
        conv = name == "conv1d"
        layouts = {"column": _cut(column, "weight", 1 if conv else 0, degree, index)}
        layouts["row"] = _cut(row, "weight", 0 if conv else 1, degree, index)
        if column.bias is not None:
            layouts["bias"] = _cut(column, "bias", 0, degree, index)

        x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        expected = whole[1](torch.tanh(whole[0](x)))
        (expected**2).sum().backward()

        y = x.detach().clone().requires_grad_()
        flowing = tp_region.flow.split(y) if sequence else y
        output = row(torch.tanh(column(tp_region.enter(flowing, draws=False))))
        actual = tp_region.flow.join(output) if sequence else output
        (actual**2).sum().backward()

        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-5)
        _same_shard(layouts["column"], column.weight.grad, whole[0].weight.grad, index)
        _same_shard(layouts["row"], row.weight.grad, whole[1].weight.grad, index)
        if column.bias is not None:
            _same_shard(layouts["bias"], column.bias.grad, whole[0].bias.grad, index)
            of_row = row.bias.grad
            if sequence:
                of_row = tp_region.backend.all_reduce(of_row.clone(), tp_region.group)
            torch.testing.assert_close(of_row, whole[1].bias.grad, rtol=1e-5, atol=1e-5)


def _regions(degree: int) -> None:
    _check_region(degree, False, 8)
    for length in (8, 7, 1):
        _check_region(degree, True, length)


def _autocast() -> None:
    """The bias, which stays in full precision, does not make the output so."""
    tp_region = _tp_region(2)
    for whole in _linear_kinds().values():
        row = parallel_linear(whole[1], "rowwise", tp_region)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert row(torch.ones(2, 24)).dtype == torch.bfloat16


def test_autocast_reaches_the_output() -> None:
    run_ranks(_autocast, 2)


@DEGREES
def test_region_of_linear_layers(degree: int) -> None:
    run_ranks(_regions, degree, degree)


def _check_embedding(degree: int, rows: int, padding_idx: int | None) -> None:
    tp_region = _tp_region(degree)
    torch.manual_seed(0)
    whole = nn.Embedding(rows, 6, padding_idx=padding_idx)
    with torch.no_grad():
        whole.weight.normal_()
    vocabulary = Vocabulary(size=rows, backend=tp_region.backend, group=tp_region.group)
    module = parallel_embedding("wte", copy.deepcopy(whole), vocabulary)
    layout = _cut(module, "weight", 0, degree, tp_region.group.index, padded=True)
    ids = torch.arange(rows).repeat(2).view(2, -1)
    scale = torch.randn(2, rows, 6)
    (whole(ids) * scale).sum().backward()
    output = module(ids)
    (output * scale).sum().backward()
    torch.testing.assert_close(output, whole(ids))
    _same_shard(layout, module.weight.grad, whole.weight.grad, tp_region.group.index)
    for wrong in (rows, -1):
        with pytest.raises(IndexError, match=f"{wrong} is out of bounds"):
            module(torch.tensor([0, wrong]))


def _check_head(degree: int, rows: int) -> None:
    tp_region = _tp_region(degree)
    torch.manual_seed(0)
    whole = nn.Linear(6, rows)
    vocabulary = Vocabulary(size=rows, backend=tp_region.backend, group=tp_region.group)
    module = parallel_head(copy.deepcopy(whole), vocabulary)
    layouts = {n: _cut(module, n, 0, degree, tp_region.group.index, padded=True) for n in ("weight", "bias")}
    x = torch.randn(2, 3, 6, requires_grad=True)
    scale = torch.randn(2, 3, rows)
    expected = whole(x)
    (expected * scale).sum().backward()
    for sharded in (False, True):
        module.zero_grad()
        module.sharded_logits = sharded
        y = x.detach().clone().requires_grad_()
        logits = module(y)
        assert (type(logits) is VocabularyShard) is sharded
        assert logits.shape == expected.shape
        (logits * scale).sum().backward()
        torch.testing.assert_close(logits + 0, expected)
        torch.testing.assert_close(y.grad, x.grad)
        for name, layout in layouts.items():
            _same_shard(layout, getattr(module, name).grad, getattr(whole, name).grad, tp_region.group.index)


def _vocabulary_modules(degree: int) -> None:
    for rows in (12, 11, 9, 5):
        _check_embedding(degree, rows, None)
        _check_embedding(degree, rows, 3)
        _check_head(degree, rows)


@DEGREES
def test_embedding_and_head(degree: int) -> None:
    run_ranks(_vocabulary_modules, degree, degree)


def _logits(tokens: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(3)).mul(3).to(dtype)


def _targets(tokens: int, size: int, ignored: list[int], ignore_index: int) -> torch.Tensor:
    targets = torch.randint(0, size, (tokens,), generator=torch.Generator().manual_seed(4))
    targets[ignored] = ignore_index
    return targets


def _check_loss(degree: int, size: int, ignored: list[int], dtype: torch.dtype, **options) -> None:
    tp_region = _tp_region(degree)
    vocabulary = Vocabulary(size=size, backend=tp_region.backend, group=tp_region.group)
    whole = _logits(6, size, dtype).requires_grad_()
    local = vocabulary.shard(whole.detach()).clone().requires_grad_()
    before = local.detach().clone()
    targets = _targets(6, size, ignored, options.get("ignore_index", -100))
    expected = F.cross_entropy(whole.float() if dtype == torch.bfloat16 else whole, targets, **options)
    actual = cross_entropy(local, targets, vocabulary, **options)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    scale = torch.linspace(0.5, 2, actual.numel()).view_as(actual)
    (expected * scale).sum().backward()
    (actual * scale).sum().backward(retain_graph=True)
    wanted = vocabulary.shard(whole.grad)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype != torch.bfloat16 else {"rtol": 1e-2, "atol": 1e-4}
    torch.testing.assert_close(local.grad, wanted, **tolerance)
    torch.testing.assert_close(local.detach(), before, rtol=0, atol=0)
    local.grad = None
    (actual * scale).sum().backward()  # nothing that was saved may have been consumed
    torch.testing.assert_close(local.grad, wanted, **tolerance)


def _losses(degree: int) -> None:
    for size in (12, 11, 5):
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.2):
                _check_loss(degree, size, [1, 4], torch.float32, reduction=reduction, label_smoothing=smoothing)
        _check_loss(degree, size, [0], torch.float32, ignore_index=2)
        _check_loss(degree, size, [0], torch.float64)
        _check_loss(degree, size, [2], torch.bfloat16)
        _check_loss(degree, size, list(range(6)), torch.float32)
        _check_loss(degree, size, list(range(6)), torch.float32, reduction="sum")
    tp_region = _tp_region(degree)
    vocabulary = Vocabulary(size=11, backend=tp_region.backend, group=tp_region.group)
    local = vocabulary.shard(_logits(2, 11))
    with pytest.raises(IndexError, match="11 is out of bounds"):
        cross_entropy(local, torch.tensor([1, 11]), vocabulary)
    with pytest.raises(ValueError, match="targets of"):
        F.cross_entropy(VocabularyShard.of(local, vocabulary), torch.tensor([1]))


@DEGREES
def test_cross_entropy(degree: int) -> None:
    run_ranks(_losses, degree, degree)


def _large_logits(degree: int) -> None:
    """Exponentials overflow unless the largest logit of all ranks is subtracted."""
    tp_region = _tp_region(degree)
    vocabulary = Vocabulary(size=10, backend=tp_region.backend, group=tp_region.group)
    whole = torch.linspace(-2000, 2000, 20).view(2, 10)
    target = torch.tensor([0, 9])
    actual = cross_entropy(vocabulary.shard(whole), target, vocabulary)
    torch.testing.assert_close(actual, F.cross_entropy(whole, target))
    assert actual.isfinite()


def test_cross_entropy_of_large_logits() -> None:
    run_ranks(_large_logits, 2, 2)


def _saved_by_loss(dtype: torch.dtype) -> int:
    """Elements that the loss of [64, 40] logits keeps for its backward pass, on a rank of two."""
    tp_region = _tp_region(2)
    vocabulary = Vocabulary(size=40, backend=tp_region.backend, group=tp_region.group)
    local = vocabulary.shard(_logits(64, 40, dtype)).clone().requires_grad_()
    shard = VocabularyShard.of(local, vocabulary)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(shard.float().view(-1, 40), torch.arange(64) % 40)
    return sum(size for size in saved.values() if size >= 64 * 20)


def test_loss_saves_one_tensor_of_the_size_of_the_logits() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert run_ranks(_saved_by_loss, 2, dtype) == [64 * 20] * 2
