"""One changed bit is found, with the step and the rank; nothing else is; and what the check costs."""

from __future__ import annotations

import pytest
import torch
from guards_corruption import flip, train, train_with_uneven_inputs
from neuron_accel_guards.sums import Projection, beyond_rounding, bits

from neuron_accel.errors import CorruptionError
from neuron_accel.testing import RanksError, run_ranks

STRATEGIES = {"dp": [], "zero1": ["zero1"], "fully sharded": [{"fully_sharded": {"modules": "head"}}]}


def error_of(plugins, what, ranks=2, **options):
    with pytest.raises(RanksError) as caught:
        run_ranks(train, ranks, plugins, what, timeout=50, **options)
    errors = caught.value.errors
    assert sorted(errors) == list(range(ranks))
    assert all(isinstance(error, CorruptionError) for error in errors.values()), caught.value
    assert len({str(error) for error in errors.values()}) == 1
    return str(errors[0])


@pytest.mark.parametrize("plugins", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sum", "rank 1: received a sum of gradients that is not the sum of what the ranks sent"),
        ("gradient", "memory changed that nothing wrote: a reduced gradient"),
        ("weight", "memory changed that nothing wrote: "),
        ("state", "memory changed that nothing wrote: exp_avg of "),
    ],
)
def test_a_changed_bit_is_found_in_its_step_on_its_rank(plugins, what, words):
    text = error_of(plugins, what, step=3)
    assert "Values of rank 1 " in text or ("Values of ranks 0, 1 " in text and "its weights after the step" in text)
    assert "were corrupted in step 3." in text
    assert words in text
    assert "rank 0: memory" not in text
    assert "rank 0: received" not in text


def test_the_replica_that_differs_from_the_majority_is_named():
    text = error_of([], "update", ranks=4, rank=2)
    assert "Values of rank 2 were corrupted in step 3." in text
    assert "rank 2: its weights after the step differ from those of rank 0, 1, 3" in text


def test_an_error_that_is_read_later_names_its_step():
    assert "were corrupted in step 3." in error_of(["zero1"], "weight", every=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plugins", STRATEGIES.values(), ids=STRATEGIES)
def test_rounding_is_no_corruption(plugins, dtype):
    run_ranks(train, 2, plugins, steps=200, dtype=dtype, clip=True, timeout=50)


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["dp", "zero1"])
def test_ranks_that_ran_out_of_data_take_part(plugins):
    run_ranks(train_with_uneven_inputs, 2, plugins, timeout=50)


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["dp", "zero1"])
def test_the_collectives_of_a_step_are_as_documented(plugins):
    (plain, _), *_ = run_ranks(train, 2, plugins, every=0, steps=3, timeout=50)
    (checked, _), *_ = run_ranks(train, 2, plugins, every=3, steps=3, timeout=50)
    rest = list(checked)
    for each in plain:
        rest.remove(each)
    # Two float64 for each sum, which both ways of adding send once to the other rank.
    numbers = {op: sum(name == op for name, _ in plain) for op in ("all_reduce", "reduce_scatter")}
    sums = [(op, 16 * number) for op, number in numbers.items() if number]
    read = 3 * 8 * (2 + 2)  # in every third step: two flags and two numbers of weights, for each of three steps
    assert rest == [*sums, ("all_gather", read)]


# ---- the checksums ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_flipped_bit_changes_the_checksum_of_memory(dtype):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = int(bits(tensor))
    for bit in range(8 * tensor.element_size() - 1):
        flip(tensor, bit)
        assert int(bits(tensor)) != before
        flip(tensor, bit)
    assert int(bits(tensor)) == before


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 511, 512, 100_000])
@pytest.mark.parametrize("kind", ["random", "equal", "alternating", "shared"])
def test_sums_are_told_from_rounding(lazy, dtype, length, kind):
    generator = torch.Generator().manual_seed(length)
    terms = [torch.randn(length, generator=generator) for _ in range(8)]
    if kind == "equal":
        terms = [torch.full((length,), 0.1 * (rank + 1)) for rank in range(8)]
    if kind == "alternating":
        terms = [torch.tensor([0.1, -0.1]).repeat(length)[:length] * (rank + 1) for rank in range(8)]
    if kind == "shared":
        terms = [terms[0] + 0.01 * term for term in terms]
    terms = [term.to(dtype) for term in terms]
    total = terms[0].clone()
    for term in terms[1:]:
        total += term  # rounded at every addition
    project = Projection(lazy)
    expected = torch.stack([project([term]) for term in terms]).sum(0)
    assert not beyond_rounding(expected, project([total]), dtype, 8, lazy)
    wrong = total.clone()
    wrong[length // 2] += 2 * float(total.float().norm()) + 1
    assert beyond_rounding(expected, project([wrong]), dtype, 8, lazy)
