"""Parameters that do not train are sharded, and may begin and stop to train at any step."""

from __future__ import annotations

import functools

import pytest
import torch

from neuron_accel import NeuronAccelerator
from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from tests.distributed.models import llama, token_batches
from tests.distributed.strategies.fully_sharded.test_pipelines import olmo2
from tests.distributed.strategies.fully_sharded.test_use import (
    STAGE_2,
    STAGE_3,
    TP2,
    memory,
    own_rows,
    prepared,
    step,
    train,
)
from tests.distributed.strategies.fully_sharded.values import has_values


def mostly_frozen(blocks=2, vocabulary=96):
    """Only the last block and the final norm train."""
    model = llama(blocks=blocks, vocabulary=vocabulary)
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    model.model.norm.requires_grad_(True)
    return model


@pytest.mark.parametrize("plugins", [STAGE_3, STAGE_2, [TP2, *STAGE_3]], ids=["stage 3", "stage 2", "tp2"])
def test_trains_like_one_process(plugins):
    ranks = 4 if TP2 in plugins else 2
    training = Training(max_norm=0.5, accumulation=2)
    assert_parallel_equivalence(mostly_frozen, token_batches(4), plugins, ranks=ranks, training=training)


def test_a_rank_keeps_its_share():
    for kept, weights, most in run_ranks(memory, 4, STAGE_3, mostly_frozen):
        assert kept <= weights / 4 + 3 * weights / 8 / 4 + 6 * weights / 8
        assert most <= 3


def traffic(plugins):
    """What a step gathers and reduces, in bytes of the weights of a block and of those in no block."""
    accelerator, model, optimizer = prepared(plugins, functools.partial(mostly_frozen, blocks=4))
    for batch in token_batches(2):
        with accelerator.run.backend.record() as sent:
            step(accelerator, model, optimizer, batch)
    own = {op: sum(t.sent for t in sent.transfers if t.op == op) for op in ("all_gather", "reduce_scatter")}
    block = sum(4 * p.numel() for p in model.model.layers[0].parameters())
    rest = sum(4 * p.numel() for p in model.parameters()) - 4 * block
    return own, block, rest, 4 * model.model.norm.weight.numel()


def test_what_does_not_train_is_gathered_and_not_reduced():
    for own, block, rest, norm in run_ranks(traffic, 2, STAGE_3):
        # The backward pass ends in the block that trains: those before it are gathered once, and freed.
        assert own["all_gather"] == pytest.approx((5 * block + rest) / 2, rel=0.02)
        assert own["reduce_scatter"] == pytest.approx((block + norm) / 2, rel=0.02)


def look():
    accelerator, model, optimizer = prepared(STAGE_3, mostly_frozen)
    before = not any(map(has_values, model.parameters()))
    step(accelerator, model, optimizer, token_batches(1)[0])
    model(**own_rows(accelerator, token_batches(1)[0])).logits.sum()
    with torch.no_grad():
        model(**own_rows(accelerator, token_batches(1)[0]))
    return before, not any(map(has_values, model.parameters()))


def test_between_uses_it_has_no_values():
    assert run_ranks(look, 2) == [(True, True)] * 2


# ---- freezing and unfreezing -----------------------------------------------------------------------------------------
def gradually(plugins, accumulation=1, save=None):
    """One block after another begins to train, the head in between for one step only."""
    accelerator, model, optimizer = prepared(plugins, mostly_frozen, gradient_accumulation_steps=accumulation)
    for index, batch in enumerate(token_batches(4 * accumulation)):
        now = index // accumulation
        model.lm_head.requires_grad_(now in (1, 3))
        model.model.layers[0].mlp.requires_grad_(now >= 1)
        model.model.embed_tokens.requires_grad_(now >= 2)
        model.model.layers[1].mlp.requires_grad_(now < 2)
        step(accelerator, model, optimizer, batch)
    if save is not None:
        accelerator.save_state(save)
    return accelerator.get_state_dict(model), [name for name, p in model.named_parameters() if has_values(p)]


def outside(plugins):
    """An optimizer of what trains alone, to which a part of the model is added later."""
    accelerator = NeuronAccelerator(config={"plugins": plugins})
    torch.manual_seed(0)
    model = mostly_frozen()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-6)
    model, optimizer = accelerator.prepare(model, optimizer)
    for index, batch in enumerate(token_batches(4)):
        if index == 2:
            added = list(model.model.layers[0].parameters())
            for parameter in added:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": added, "lr": 1e-2})
        step(accelerator, model, optimizer, batch)
    return accelerator.get_state_dict(model), []


def uneven(plugins):
    """A block begins to train where the second rank has no batch left."""
    accelerator, model, optimizer = prepared(plugins, mostly_frozen)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for index, batch in enumerate(token_batches(4)[: 4 if accelerator.process_index == 0 else 1]):
            model.model.layers[0].mlp.requires_grad_(index >= 2)
            step(accelerator, model, optimizer, batch)
    return accelerator.get_state_dict(model), []


LOOPS = {
    "gradually": gradually,
    "gradually, accumulating": functools.partial(gradually, accumulation=2),
    "added to the optimizer": outside,
    "uneven": uneven,
}


@pytest.mark.parametrize(
    ("loop", "plugins"), [*((loop, STAGE_3) for loop in LOOPS), ("gradually, accumulating", STAGE_2)]
)
def test_what_begins_to_train_does_so_as_under_zero1(loop, plugins):
    (expected, _), (found, whole) = run_ranks(LOOPS[loop], 2, ["zero1"])[0], run_ranks(LOOPS[loop], 2, plugins)[0]
    assert whole == []
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


# ---- checkpoints -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("first", "second"), [(["zero1"], STAGE_3), (STAGE_3, ["zero1"]), (STAGE_2, [TP2, *STAGE_3])])
def test_checkpoints(first, second, tmp_path):
    folder, ranks = str(tmp_path / "checkpoint"), 4 if TP2 in second else 2
    run_ranks(train, 2, first, mostly_frozen, save=folder, steps=(0, 2))
    _, expected = run_ranks(train, 2, ["zero1"], mostly_frozen)[0]
    _, found = run_ranks(train, ranks, second, zeroed, load=folder, steps=(2, 4))[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-6, msg=name)


def zeroed():
    """A model whose weights are all those of the checkpoint."""
    model = mostly_frozen()
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


def frozen_embeddings():
    """The input of the first block is a leaf of autograd, as PEFT makes it for blocks that are recomputed."""
    model = olmo2()
    model.get_input_embeddings().requires_grad_(False)
    model.enable_input_require_grads()
    return model


def test_a_block_whose_input_is_a_leaf():
    assert_parallel_equivalence(frozen_embeddings, token_batches(2), STAGE_3, ranks=2, training=Training(max_norm=0.5))


def beside_a_teacher(plugins):
    """Trains beside a model of the same class that was prepared first, and returns the losses of both."""
    accelerator = NeuronAccelerator(config={"plugins": plugins})
    teacher = accelerator.prepare(llama().requires_grad_(False).eval())
    model = accelerator.prepare(llama())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for batch in token_batches(2):
        loss = model(**batch).loss
        accelerator.backward(loss + teacher(**batch).loss)
        losses += [float(loss), float(teacher(**batch).loss)]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_second_model_of_the_same_class():
    for found in run_ranks(beside_a_teacher, 2, ["fully_sharded"]):
        assert found == pytest.approx(run_ranks(beside_a_teacher, 2, [])[0], rel=1e-5)
