"""Differentiable collectives compared with their definition in one process, in values and gradients.

Every rank plays all ranks in one process, with plain torch, and compares its own part. Entries are small integers, so
that everything is exact. What ranks compute "alike" counts once in the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from neuron_accel.backends import autograd
from neuron_accel.backends.torch_distributed import TorchBackend
from neuron_accel.testing import run_ranks

SHAPE = (4, 8, 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A collective and its definition.

    Args:
        run: the collective on one rank.
        define: what all ranks get, from what all ranks have.
        alike_in: all ranks hold the same input.
        alike_out: all ranks go on alike.
    """

    run: Callable
    define: Callable
    alike_in: bool = False
    alike_out: bool = False


def all_to_all_definition(split_dim: int, concat_dim: int) -> Callable:
    def define(xs):
        pieces = [x.chunk(len(xs), split_dim) for x in xs]
        return [torch.cat([pieces[peer][rank] for peer in range(len(xs))], concat_dim) for rank in range(len(xs))]

    return define


def uneven(rank: int, n: int) -> tuple[list[int], list[int]]:
    """The four rows of a rank are sent to two others: three to the next one, one to the one after it."""
    sent = [0] * n
    sent[(rank + 1) % n] += 3
    sent[(rank + 2) % n] += 1
    received = [0] * n
    received[(rank - 1) % n] += 3
    received[(rank - 2) % n] += 1
    return sent, received


def uneven_definition(xs):
    n = len(xs)
    split = [x.split(uneven(rank, n)[0]) for rank, x in enumerate(xs)]
    return [torch.cat([split[peer][rank] for peer in range(n)]) for rank in range(n)]


def cases() -> dict[str, Case]:
    found = {
        "copy": Case(run=autograd.copy_to_group, define=lambda xs: xs, alike_in=True),
        "reduce": Case(run=autograd.reduce_from_group, define=lambda xs: [sum(xs)] * len(xs), alike_out=True),
    }
    found["all-to-all uneven"] = Case(
        run=lambda x, b, g: autograd.all_to_all_uneven(x, b, g, *uneven(g.index, g.size)), define=uneven_definition
    )
    for dim in (0, 1, -1):
        found[f"gather, chunk, {dim}"] = Case(
            run=lambda x, b, g, d=dim: autograd.gather_from_group(x, b, g, d),
            define=lambda xs, d=dim: [torch.cat(xs, d)] * len(xs),
            alike_out=True,
        )
        found[f"gather, reduce-scatter, {dim}"] = Case(
            run=lambda x, b, g, d=dim: autograd.gather_from_group(x, b, g, d, grad="reduce_scatter"),
            define=lambda xs, d=dim: [torch.cat(xs, d)] * len(xs),
        )
        found[f"chunk {dim}"] = Case(
            run=lambda x, b, g, d=dim: autograd.chunk_to_group(x, b, g, d),
            define=lambda xs, d=dim: [xs[0].chunk(len(xs), d)[r] for r in range(len(xs))],
            alike_in=True,
        )
        found[f"reduce-scatter {dim}"] = Case(
            run=lambda x, b, g, d=dim: autograd.reduce_scatter_to_group(x, b, g, d),
            define=lambda xs, d=dim: list(sum(xs).chunk(len(xs), d)),
        )
        for concat_dim in (0, 1, -1):
            found[f"all-to-all {dim} {concat_dim}"] = Case(
                run=lambda x, b, g, s=dim, c=concat_dim: autograd.all_to_all(x, b, g, s, c),
                define=all_to_all_definition(dim, concat_dim),
            )
    return found


def integers(seed: int, shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-2, 3, tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaves(case: Case, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the inputs of all ranks, stored so that the collective receives a non-contiguous view."""
    if case.alike_in:
        return [integers(0, SHAPE[::-1], dtype).requires_grad_()] * n
    return [integers(r, SHAPE[::-1], dtype).requires_grad_() for r in range(n)]


def loss(case: Case, rank: int, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two results of one collective, weighed differently on every rank unless ranks go on alike; the second use is not
    linear, so that the gradient depends on the values."""
    seed = 100 if case.alike_out else 100 + rank
    weights = (integers(seed + i, first.shape, torch.float32) for i in range(0, 20, 10))
    return (first.float() * next(weights)).sum() + (second.float().square() * next(weights)).sum()


def compare(dtype: torch.dtype) -> int:
    backend = TorchBackend.connect()
    n, rank = backend.world_size, backend.rank
    group = backend.new_group([range(n)], "tp")
    for name, case in cases().items():
        reference = leaves(case, n, dtype)
        wholes = [leaf.permute(2, 1, 0).float() for leaf in reference]
        results, more = case.define(wholes), case.define([2 * x for x in wholes])
        parts = [loss(case, r, results[r], more[r]) for r in range(n)]
        (parts[0] if case.alike_out else sum(parts)).backward()

        x = leaves(case, n, dtype)[rank]
        before = x.detach().clone()
        view = x.permute(2, 1, 0)
        result = case.run(view, backend, group)
        assert result.dtype == dtype
        assert torch.equal(result.float(), results[rank]), name
        loss(case, rank, result, case.run(2 * view, backend, group)).backward()
        assert x.grad is not None, name
        assert torch.equal(x.grad, reference[rank].grad), (name, x.grad, reference[rank].grad)
        assert torch.equal(x, before), name
    return len(cases())


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(n, dtype):
    assert run_ranks(compare, n, dtype) == [len(cases())] * n


def share_a_gradient() -> None:
    """Uses one gradient tensor in two backward passes, so that an all-reduce in place would change the second."""
    backend = TorchBackend.connect()
    group = backend.new_group([range(backend.world_size)], "tp")
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    given = torch.full((3,), float(backend.rank + 1))
    (autograd.copy_to_group(x, backend, group) + y).backward(given)
    assert given.tolist() == [backend.rank + 1.0] * 3
    assert y.grad.tolist() == [backend.rank + 1.0] * 3
    assert x.grad.tolist() == [3.0] * 3

    kept = torch.full((3,), float(backend.rank + 1))  # nor may forward change what it is given
    assert autograd.reduce_from_group(kept, backend, group).tolist() == [3.0] * 3
    assert kept.tolist() == [backend.rank + 1.0] * 3


def test_gradients_are_not_changed_in_place():
    run_ranks(share_a_gradient, 2)


def differentiate_twice() -> None:
    backend = TorchBackend.connect()
    n, rank = backend.world_size, backend.rank
    group = backend.new_group([range(n)], "tp")
    for name in ("copy", "reduce-scatter 1", "gather, reduce-scatter, -1", "all-to-all 0 1", "chunk 0"):
        case = cases()[name]
        ref = leaves(case, n, torch.float32)
        results = case.define([x.permute(2, 1, 0) for x in ref])
        total = sum((results[r] ** 3 * (r + 1)).sum() for r in range(n))
        first = torch.autograd.grad(total, ref[0] if case.alike_in else ref, create_graph=True)
        sum(g.square().sum() for g in first).backward()

        x = leaves(case, n, torch.float32)[rank]
        own = (case.run(x.permute(2, 1, 0), backend, group) ** 3 * (rank + 1)).sum()
        (gradient,) = torch.autograd.grad(own, x, create_graph=True)
        # a gradient that all ranks hold alike goes through the backward of an all-reduce: counted once
        gradient.square().sum().backward()
        assert torch.equal(x.grad, ref[rank].grad), name


def test_second_derivatives():
    run_ranks(differentiate_twice, 2)


def saved_bytes() -> dict[str, int]:
    backend = TorchBackend.connect()
    group = backend.new_group([range(backend.world_size)], "tp")
    sizes = {}
    for name, case in cases().items():
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.nbytes) or t, lambda t: t):
            case.run(torch.ones(SHAPE, requires_grad=True), backend, group)
        sizes[name] = sum(kept)
    return sizes


def test_nothing_is_kept_for_the_backward_pass():
    assert set(run_ranks(saved_bytes, 2)[0].values()) == {0}


def chunk_memory() -> int:
    backend = TorchBackend.connect()
    group = backend.new_group([range(backend.world_size)], "tp")
    return autograd.chunk_to_group(torch.ones(8, 4), backend, group, 0).untyped_storage().nbytes()


def test_a_chunk_does_not_keep_the_full_tensor_alive():
    assert run_ranks(chunk_memory, 2) == [64, 64]


def reduce_in_place() -> None:
    backend = TorchBackend.connect()
    group = backend.new_group([range(backend.world_size)], "tp")
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    weight = torch.ones(4, 3, requires_grad=True)
    partial = torch.nn.functional.linear(x, weight)
    place = partial.data_ptr()
    total = autograd.reduce_from_group(partial, backend, group, given_up=True)
    assert total.data_ptr() == place
    assert torch.equal(total, 2 * torch.nn.functional.linear(x, weight))
    total.square().sum().backward()
    with torch.no_grad():
        gradient = 2 * total
        assert torch.equal(x.grad, gradient @ weight)
        assert torch.equal(weight.grad, gradient.t() @ x)

    kept = x.exp()  # its backward pass needs it
    spoiled = autograd.reduce_from_group(kept, backend, group, given_up=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        spoiled.sum().backward()


def test_an_input_that_is_given_up_is_reduced_in_place():
    run_ranks(reduce_in_place, 2)
