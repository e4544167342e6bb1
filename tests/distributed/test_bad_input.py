"""What is wrong with a run is said: what, where, why and what to do, on every rank, and nobody hangs."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

from neuron_accel.engine.plan.plugin import Claim, Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import NeuronAccelError
from neuron_accel.testing import RanksError, run_ranks
from tests.distributed.loop.loops_support import TP2, adamw, forward, model
from tests.distributed.models import gpt2, llama, token_batches


class SecondReducer(StrategyPlugin):
    """Claims what plain data parallelism and ZeRO-1 do."""

    spec = PluginSpec(
        name="second_reducer", api_version=4, phase=Phase.GRADIENTS, claims=frozenset({Claim.GRADIENT_REDUCTION})
    )

    def backward_pass(self, loss, run):
        yield

    def gradients(self, run):
        pass


def start(plugins, **options):
    from neuron_accel import NeuronAccelerator

    return NeuronAccelerator(config={"plugins": plugins}, **options)


def start_twice_claimed():
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    NeuronAccelerator(plugins=[SecondReducer(), Zero1Plugin()])


def start_differently():
    start(["zero1"] if os.environ["RANK"] == "0" else [{"zero1": {"max_norm": 1.0}}])


def start_with_an_error_on_one_rank():
    start(["zero1"] if os.environ["RANK"] == "0" else ["zero2"])


def prepare_uneven_heads():
    """Heads that do not divide are padded elsewhere; BLOOM's position biases belong to heads by number."""
    from transformers import BloomConfig, BloomForCausalLM

    start([TP2]).prepare(BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=36, n_layer=1, n_head=3)))


def prepare_uneven_mlp():
    """Features that do not divide are padded elsewhere; not inside experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=49,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    start([TP2]).prepare(MixtralForCausalLM(config))


def prepare_unknown_model():
    start([TP2]).prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def prepare_with_another(plugins):
    start(plugins).prepare(prepared := model())
    start(plugins).prepare(prepared)


def prepare_foreign_optimizer(plugins):
    accelerator = start(plugins)
    net, other = model(), nn.Linear(3, 3)
    accelerator.prepare(net, adamw([*net.parameters(), other.weight]))


def step_with_orphans(plugins):
    accelerator = start(plugins)
    net = model()
    net, optimizer = accelerator.prepare(net, adamw(net.lm_head.parameters()))
    accelerator.backward(forward(net, token_batches(1)[0]).loss)
    optimizer.step()


BAD = {
    "world size": (3, start, ([TP2],), "PlanError", "3 ranks cannot be divided into groups of 2 (tp 2)."),
    "sequence without tensor": (2, start, (["sequence_parallel"],), "PlanError", "sequence_parallel"),
    "two owners": (2, start_twice_claimed, (), "PlanError", "gradient_reduction"),
    "unknown plugin": (2, start, (["zero2"],), "PluginError", "Did you mean 'zero1'?"),
    "unknown option": (2, start, ([{"zero1": {"max_nrom": 1.0}}],), "ConfigurationError", "max_norm"),
    "given twice": (2, start, (["zero1", "zero1"],), "PlanError", "zero1"),
    "heads": (2, prepare_uneven_heads, (), ("LayoutError", "UnsupportedModelError"), "3"),
    "sizes": (2, prepare_uneven_mlp, (), ("LayoutError", "UnsupportedModelError"), "49"),
    "no plan": (2, prepare_unknown_model, (), "UnsupportedModelError", "Sequential"),
    "prepared twice": (2, prepare_with_another, ([TP2],), "UsageError", "was prepared before, by another accelerator"),
    "foreign parameter": (2, prepare_foreign_optimizer, (["zero1"],), "ParameterError", "shape (3, 3)"),
    "foreign parameter, plain": (2, prepare_foreign_optimizer, ([],), "ParameterError", "shape (3, 3)"),
    "orphans": (2, step_with_orphans, (["zero1"],), "ParameterError", "No optimizer holds model.embed_tokens.weight"),
    "orphans, plain": (2, step_with_orphans, ([],), "ParameterError", "No optimizer holds model.embed_tokens.weight"),
    "orphans, tp": (2, step_with_orphans, ([TP2],), "ParameterError", "No optimizer holds model.embed_tokens.weight"),
}


@pytest.mark.parametrize("case", BAD)
def test_every_rank_says_what_is_wrong(case):
    ranks, function, arguments, kinds, text = BAD[case]
    with pytest.raises(RanksError) as caught:
        run_ranks(function, ranks, *arguments, timeout=30)
    assert sorted(caught.value.errors) == list(range(ranks))
    for error in caught.value.errors.values():
        assert isinstance(error, NeuronAccelError)
        assert type(error).__name__ in kinds
        assert text in str(error)
        assert error.why or error.fix, "an error says why, or what to do"


def test_ranks_with_different_plans_all_say_what_differs():
    with pytest.raises(RanksError) as caught:
        run_ranks(start_differently, 2)
    assert sorted(caught.value.errors) == [0, 1]
    for error in caught.value.errors.values():
        assert type(error).__name__ == "DesyncError"
        for text in ("Rank 1 has another configuration than rank 0.", "max_norm", "None on rank 0", "1.0 on rank 1"):
            assert text in str(error)


def test_an_error_in_the_configuration_of_one_rank_stops_all():
    with pytest.raises(RanksError, match="zero2") as caught:
        run_ranks(start_with_an_error_on_one_rank, 2, grace=300)
    assert {rank: type(error).__name__ for rank, error in caught.value.errors.items()} == {
        0: "CommunicationError",
        1: "PluginError",
    }


def die_mid_step(plugins, how):
    accelerator = start(plugins)
    net = model()
    net, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    for step, batch in enumerate(token_batches(4)):
        loss = forward(net, batch).loss
        if step == 2 and accelerator.state.process_index == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the disk is full")
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("plugins", [[], ["zero1"], [TP2]])
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_dies_takes_the_others_with_it(plugins, how):
    with pytest.raises(RanksError) as caught:
        run_ranks(die_mid_step, 2, plugins, how, grace=300)
    errors = caught.value.errors
    assert type(errors[0]).__name__ == "CommunicationError"
    assert "a peer has most likely ended" in str(errors[0])
    assert "look for the first error in the output of the other ranks" in str(errors[0])
    assert type(errors[1]).__name__ == ("RankExit" if how == "killed" else "RuntimeError")


def rebound_on_rank(plugins, family):
    """An optimizer built before the model was rewritten."""
    accelerator = start(plugins)
    torch.manual_seed(0)
    net = {"llama": llama, "gpt2": gpt2}[family]()
    named = dict(net.named_parameters())
    decayed = [p for n, p in named.items() if p.dim() > 1]
    others = [p for n, p in named.items() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.0, "lr": 1e-4}, {"params": decayed, "betas": (0.8, 0.9)}], lr=1e-2
    )
    names = [[next(n for n, q in named.items() if q is p) for p in g["params"]] for g in optimizer.param_groups]
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    net, prepared = accelerator.prepare(net, optimizer)
    current = dict(net.named_parameters())
    found = [
        [next((n for n, q in current.items() if q is p), None) for p in g["params"]] for g in prepared.param_groups
    ]
    found_options = [{k: v for k, v in g.items() if k != "params"} for g in prepared.param_groups]
    return names == found, options == found_options, sum(map(len, found)) == len(current)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("plugins", [[], ["zero1"], [TP2], [TP2, "sequence_parallel", "zero1"]])
def test_an_optimizer_built_before_holds_exactly_the_rewritten_parameters(plugins, family):
    assert run_ranks(rebound_on_rank, 2, plugins, family) == [(True, True, True)] * 2


def fine_tune_on_rank(plugins):
    """Frozen parts, an optimizer each for two parts, and a model that is only looked at, hurt nobody."""
    accelerator = start(plugins)
    net, teacher = model(), model()
    net.model.embed_tokens.requires_grad_(False)
    head, body = adamw(net.lm_head.parameters()), adamw(net.model.layers.parameters())
    norm = torch.optim.SGD(net.model.norm.parameters(), lr=0.1)
    net, head, body, norm = accelerator.prepare(net, head, body, norm)
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    for batch in token_batches(2):
        with torch.no_grad():
            target = forward(teacher, batch).logits
        accelerator.backward((forward(net, batch).logits - target).square().mean() + forward(net, batch).loss)
        for optimizer in (head, body, norm):
            optimizer.step()
            optimizer.zero_grad()
    return {n: bool((p != before[n]).any()) for n, p in net.named_parameters()}


@pytest.mark.parametrize("plugins", [[], ["zero1"], [TP2]])
def test_fine_tuning_in_parts_is_no_mistake(plugins):
    for changed in run_ranks(fine_tune_on_rank, 2, plugins):
        assert {name for name, value in changed.items() if not value} == {"model.embed_tokens.weight"}
