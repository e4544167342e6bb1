"""Which rank owns which part of a bucket."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from neuron_accel.engine.optim.elementwise import is_elementwise, is_separable, why_not_elementwise
from neuron_accel.engine.shards.partition import MOST_PADDING, even, owners_of, unsplit

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=12)
DEGREES = st.integers(1, 9)


def whole(sizes, degree):
    return unsplit(sizes, degree, owners_of(sizes, [0] * degree))


@pytest.mark.parametrize("divide", [even, whole])
@given(sizes=SIZES, degree=DEGREES)
def test_the_spans_of_all_ranks_contain_every_element_once(divide, sizes, degree):
    partition = divide(sizes, degree)
    seen = [[0] * size for size in sizes]
    for rank in range(degree):
        for piece in partition.spans(rank):
            place = partition.place(rank)
            assert 0 <= piece.offset <= place.stop - place.start - (piece.stop - piece.start)
            for element in range(piece.start, piece.stop):
                seen[piece.parameter][element] += 1
                # the element lies in the buffer where the parameter's offset says
                begin = place.start + piece.offset - piece.start
                assert begin + element == partition.offsets[piece.parameter] + element
    assert all(count == 1 for counts in seen for count in counts)


@given(sizes=SIZES, degree=DEGREES)
def test_even_pads_less_than_one_element_per_rank(sizes, degree):
    partition = even(sizes, degree)
    if sum(sizes):
        assert partition.numel - sum(sizes) < degree
    else:  # a collective wants something to carry
        assert partition.chunk == 1


@given(sizes=SIZES, degree=DEGREES)
def test_the_unsplit_partition_splits_no_parameter_and_balances_ranks(sizes, degree):
    partition = whole(sizes, degree)
    for rank in range(degree):
        for piece in partition.spans(rank):
            assert (piece.start, piece.stop) == (0, sizes[piece.parameter])
    # Graham's bound for longest processing time first
    assert partition.chunk <= max(1, sum(sizes) / degree + max(sizes))
    assert partition.numel <= max(MOST_PADDING * sum(sizes), degree)


@given(buckets=st.lists(SIZES, min_size=1, max_size=6), degree=DEGREES)
def test_ranks_that_have_more_of_one_bucket_have_less_of_the_next(buckets, degree):
    loads = [0] * degree
    for sizes in buckets:
        owners_of(sizes, loads)
    everything = [size for sizes in buckets for size in sizes]
    assert sum(loads) == sum(everything)
    assert max(loads) - min(loads) <= max(everything)


class _Lamb(torch.optim.Optimizer):
    """Uses the norm of each full parameter."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / p.grad.norm()))


class _Angle(torch.optim.SGD):
    """Uses the angle between the gradient and the full parameter, as AdamP does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                cosine = torch.nn.functional.cosine_similarity(p.reshape(-1), p.grad.reshape(-1), dim=0).abs()
                p.add_(p.grad, alpha=-group["lr"] * (2 if cosine < 1e-3 else 1))


class _GlobalNorm(torch.optim.SGD):
    """Uses the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step(closure)


class _OwnRate(torch.optim.Optimizer):
    """Estimates its learning rate from all parameters together, starting from a tiny one, as Prodigy does."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})
        self.rate, self.way = 1e-6, {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            ahead = sum(float((p.grad * self.way[p]).sum()) for p in group["params"] if p in self.way)
            self.rate += 1e-6 * ahead
            for p in group["params"]:
                self.way[p] = p.grad + self.way.get(p, 0)
                p.add_(p.grad, alpha=-group["lr"] * self.rate)


ELEMENTWISE = ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_finds_elementwise_optimizers(name):
    options = {"lr": 0.0} if name != "SGD" else {"lr": 0.0, "momentum": 0.9, "nesterov": True}
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(3))], **options)
    assert is_elementwise(optimizer)
    assert is_separable(optimizer)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_finds_optimizers_that_use_full_parameters(name):
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(3, 4))], lr=0.0)
    assert not is_elementwise(optimizer)
    assert is_separable(optimizer)


@pytest.mark.parametrize("kind", [_Lamb, _Angle])
def test_tries_classes_it_has_never_seen(kind):
    optimizer = kind([nn.Parameter(torch.ones(3, 4))], lr=0.0)
    assert not is_elementwise(optimizer)
    assert is_separable(optimizer)


class _Momentum8Bit(torch.optim.Optimizer):
    """Keeps momentum in 8 bits for parameters of 4096 elements and more, as torchao's optimizers: with one scale for
    every 256 elements."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = p.grad + 0.9 * self.state[p].get("momentum", 0)
                p.add_(momentum, alpha=-group["lr"])
                if p.numel() >= 4096 and p.numel() % 256 == 0:
                    blocks = momentum.view(-1, 256)
                    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
                    momentum = ((blocks / scales).round() * scales).view(p.shape)
                self.state[p]["momentum"] = momentum


def test_finds_states_that_are_quantized_in_blocks_from_some_size_on():
    optimizer = _Momentum8Bit([nn.Parameter(torch.ones(3, 4))])
    assert "blocks of the full parameter" in why_not_elementwise(optimizer)
    assert is_separable(optimizer)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_finds_that_those_of_torchao_are(name):
    library = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    optimizer = getattr(library, name)([nn.Parameter(torch.ones(3, 4))], lr=1e-2)
    with torch.compiler.set_stance("force_eager"):  # it compiles its step for every shape
        assert "blocks of the full parameter" in why_not_elementwise(optimizer)
        assert is_separable(optimizer)


@pytest.mark.parametrize("kind", [_GlobalNorm, _OwnRate])
def test_finds_optimizers_that_look_at_all_parameters_together(kind):
    optimizer = kind([nn.Parameter(torch.ones(3, 4))], lr=1.0)
    assert not is_elementwise(optimizer)
    assert not is_separable(optimizer)
