"""Random numbers: apart inside tensor-parallel regions, together outside, and the same again when recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuron_accel.testing.ranks import run_ranks
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import (
    FAMILIES,
    batch,
    full_gradients,
    make_run,
    shard,
)

DROPOUT = {
    "llama": {"attention_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
}


def _model(family: str, sequence_parallel: bool):
    model = FAMILIES[family](**DROPOUT[family])
    run = make_run(degree=2, sequence_parallel=sequence_parallel)
    return model, run, shard(model, run)


def _masks(family: str, sequence_parallel: bool) -> dict[str, list[torch.Tensor]]:
    """Which elements were dropped in one training forward: inside regions (attention weights) and outside."""
    model, *_ = _model(family, sequence_parallel)
    kept: dict[str, list[torch.Tensor]] = {"inside": [], "outside": []}

    def attention(module, args, output):
        # Weights of later positions are zero anyhow; below the diagonal only dropout makes zeros.
        kept["inside"].append(output[1].tril()[..., 4:, :4] != 0)

    for name, module in model.named_modules():
        if name.endswith(("self_attn", ".attn")):
            module.register_forward_hook(attention)
        elif isinstance(module, nn.Dropout) and not name.endswith("attn_dropout"):
            module.register_forward_hook(lambda module, args, output: kept["outside"].append(output != 0))
    torch.manual_seed(5)
    model(batch()["input_ids"])
    kept["afterwards"] = [torch.rand(3)]
    return kept


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_masks_differ_inside_regions_only(family: str) -> None:
    first, second = run_ranks(_masks, 2, family, False)
    assert len(first["inside"]) == 2
    for mine, theirs in zip(first["inside"], second["inside"], strict=True):
        assert not mine.all()
        assert not torch.equal(mine, theirs)
    assert len(first["outside"]) == {"llama": 0, "gpt2": 5}[family]
    for name in ("outside", "afterwards"):
        for mine, theirs in zip(first[name], second[name], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_masks_differ_on_shares_of_the_sequence(family: str) -> None:
    first, second = run_ranks(_masks, 2, family, True)
    for mine, theirs in zip(first["inside"], second["inside"], strict=True):
        assert not torch.equal(mine, theirs)
    if family == "gpt2":
        embedding, *residual = zip(first["outside"], second["outside"], strict=True)
        assert torch.equal(*embedding)  # before the sequence is sharded
        assert len(residual) == 4
        assert not any(torch.equal(*masks) for masks in residual)
    assert torch.equal(first["afterwards"][0], second["afterwards"][0])


def _recomputed(family: str, sequence_parallel: bool) -> None:
    gradients = []
    for checkpointing in (None, False, True):
        model, run, parameters = _model(family, sequence_parallel)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        torch.manual_seed(7)
        loss = model(**batch()).loss
        loss.backward()
        gradients.append(full_gradients(parameters, run))
        numbers = run.backend.all_gather(torch.rand(1), run.world)
        assert numbers[0] == numbers[1]
    for other in gradients[1:]:
        for name, value in gradients[0].items():
            torch.testing.assert_close(other[name], value)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_checkpointing_draws_the_same_again(family: str, sequence_parallel: bool) -> None:
    run_ranks(_recomputed, 2, family, sequence_parallel)


def _interrupted(sequence_parallel: bool) -> None:
    """An error inside a region leaves the ranks drawing together."""
    model, run, _ = _model("gpt2", sequence_parallel)

    def fail(module, args):
        raise RuntimeError("out of memory, say")

    handle = model.transformer.h[1].attn.c_proj.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(**batch())
    handle.remove()
    numbers = run.backend.all_gather(torch.rand(1), run.world)
    assert numbers[0] == numbers[1]
    model(**batch())


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
def test_an_error_leaves_ranks_together(sequence_parallel: bool) -> None:
    run_ranks(_interrupted, 2, sequence_parallel)


def _untouched() -> None:
    """Without dropout no random number is drawn: runs are those of other degrees."""
    model = FAMILIES["gpt2"]()
    shard(model, make_run(degree=2))
    torch.manual_seed(3)
    model(**batch()).loss.backward()
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))


def test_without_dropout_nothing_is_drawn() -> None:
    run_ranks(_untouched, 2)
