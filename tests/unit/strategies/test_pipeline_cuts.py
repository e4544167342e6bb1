"""Where models are split into stages, how micro-batches are weighted, and deferred weight gradients."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from neuron_accel import ModelParallelismPlugin, PipelineParallelPlugin, TensorParallelPlugin
from neuron_accel.engine.plan.planner import make_plan
from neuron_accel.engine.plan.plugin import Claim
from neuron_accel.engine.sharding.parameters import ParameterMap
from neuron_accel.errors import ConfigurationError, PlanError, UnsupportedModelError, UsageError
from neuron_accel.models.stages import Stack
from neuron_accel.strategies.pipeline.cuts import balanced, cost, cut
from neuron_accel.strategies.pipeline.deferred_wgrad import DeferredWgrad, Later
from neuron_accel.strategies.pipeline.microbatches import LossWeights, convert, split
from tests.distributed.strategies.pipeline.pipeline_support import FAMILIES, gpt2, llama, mixtral
from tests.sweeps.tiny import tiny_model


# ---- the plan --------------------------------------------------------------------------------------------------------
def plan(world_size, capabilities=("point-to-point",), **options):
    plugin = ModelParallelismPlugin(pipeline_parallel_size=2, num_microbatches=4, **options)
    return make_plan([plugin], world_size=world_size, backend_capabilities=capabilities)


def test_a_pipeline_is_a_strategy_of_its_own_in_the_plan():
    found = plan(2)
    assert [plugin.spec.name for plugin in found.plugins] == ["model_parallelism", "pipeline_parallel"]
    assert found.owners[Claim.BACKWARD] == "pipeline_parallel"
    assert found.mesh.degree("pp") == 2
    assert ModelParallelismPlugin().companions() == ()


def test_model_parallelism_passes_its_options_to_its_companions():
    tensor, pipe = ModelParallelismPlugin(
        2,
        parallelize_embeddings=False,
        pipeline_parallel_size=4,
        num_microbatches=8,
        schedule="interleaved",
        virtual_stages=2,
        stage_cuts=("a", "b"),
        evaluation_logits=False,
    ).companions()
    assert tensor == TensorParallelPlugin(tensor_parallel_size=2, parallelize_embeddings=False)
    assert (pipe.pipeline_parallel_size, pipe.num_microbatches, pipe.schedule) == (4, 8, "interleaved")
    assert (pipe.virtual_stages, pipe.stage_cuts, pipe.evaluation_logits) == (2, ("a", "b"), False)


def test_a_pipeline_of_one_rank_is_refused():
    with pytest.raises(ConfigurationError, match="at least 2 ranks"):
        PipelineParallelPlugin(pipeline_parallel_size=1)
    with pytest.raises(TypeError, match="pipeline_parallel_size"):
        PipelineParallelPlugin()
    with pytest.raises(ConfigurationError, match="num_microbatches is 0"):
        PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=0)


def test_a_backend_that_can_neither_send_nor_cut_graphs_is_refused():
    with pytest.raises(PlanError, match="not possible on this backend"):
        plan(2, capabilities=())
    assert plan(2, capabilities=("lazy",)).mesh.degree("pp") == 2


# ---- cuts ------------------------------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 20), st.integers(0, 20), st.data())
def test_no_other_cut_has_a_cheaper_most_expensive_stage(blocks, before, after, data):
    stages = data.draw(st.integers(1, len(blocks)))

    def largest(starts):
        stops = (*starts[1:], len(blocks))
        costs = [sum(blocks[a:b]) for a, b in zip(starts, stops, strict=True)]
        costs[0] += before
        costs[-1] += after
        return max(costs)

    found = balanced([float(block) for block in blocks], before, after, stages)
    assert found[0] == 0
    assert all(a < b for a, b in itertools.pairwise(found))
    everywhere = itertools.combinations(range(1, len(blocks)), stages - 1)
    assert largest(found) == min(largest((0, *rest)) for rest in everywhere)


def test_equal_blocks_are_assigned_evenly():
    assert balanced([1.0] * 8, 0, 0, 4) == (0, 2, 4, 6)
    assert balanced([1.0] * 8, 0, 2, 4) == (0, 2, 4, 7) or balanced([1.0] * 8, 0, 2, 4) == (0, 3, 5, 7)


def test_a_large_head_takes_the_place_of_blocks():
    """The output layer of a small model with a large vocabulary costs as much as many blocks; the embedding does
    not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=8000, hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=4
            )
        )
    _, starts = cut(model, 2, None)
    assert starts == (0, 11)
    block, head = cost(model.model.layers[0]), cost(model.lm_head)
    assert head > 10 * block
    assert cost(model.model.embed_tokens) == 64


def test_stages_are_balanced_by_the_original_model():
    """Not by the shards that a rank keeps, and without what strategies have added."""
    model = llama()
    parameters, starts = ParameterMap(model), cut(model, 2, None)[1]
    model.model.layers[0].adapter = nn.Linear(64, 65536)
    parameters.follow(model)
    assert cut(model, 2, None, parameters)[1] == starts != cut(model, 2, None)[1]
    head = parameters["lm_head.weight"].layout
    parameters.set_layout("lm_head.weight", replace(head, shape=(1_000_000, head.shape[1])))
    assert cut(model, 2, None, parameters)[1] == (0, len(model.model.layers) - 1)


@pytest.mark.parametrize(
    "family", ["granitemoe", "hunyuan_v1_moe", "jetmoe", "nanochat", "nemotron", "olmoe", "phimoe"]
)
def test_families_without_a_plan_for_pipelines_whose_parts_have_llamas_names(family):
    with torch.device("meta"):
        stack = Stack.of(tiny_model(family))
    assert (stack.container, stack.before) == ("model.layers", ("model.embed_tokens",))
    assert stack.after[-1] == "lm_head"


@pytest.mark.parametrize(("family", "kind"), [("t5", "sequences to sequences"), ("vit", "images")])
def test_encoders_with_a_decoder_or_without_tokens_are_refused(family, kind):
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match="not one list of blocks behind a token emb"):
        Stack.of(tiny_model(family, kind))


@pytest.mark.parametrize(
    ("model_fn", "container", "before", "after"),
    [
        (llama, "model.layers", ("model.embed_tokens",), ("model.norm", "lm_head")),
        (mixtral, "model.layers", ("model.embed_tokens",), ("model.norm", "lm_head")),
        (gpt2, "transformer.h", ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")),
        (FAMILIES["gpt-neox"], "gpt_neox.layers", ("gpt_neox.embed_in",), ("gpt_neox.final_layer_norm", "lm_head")),
    ],
)
def test_families_are_cut_by_their_plans(model_fn, container, before, after):
    stack = Stack.of(model_fn())
    assert (stack.container, stack.blocks, stack.before, stack.after) == (container, 4, before, after)
    parts = dict(stack.stages_of((0, 1)))
    assert parts[before[0]] == 0
    assert parts[after[-1]] == parts[f"{container}.1"] == 1


def test_a_parameter_that_no_stage_can_own_is_refused():
    model = llama()
    model.model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(UnsupportedModelError, match=r"model\.scale"):
        Stack.of(model)


# ---- micro-batches ---------------------------------------------------------------------------------------------------
def test_batches_are_sharded_and_what_belongs_to_all_samples_is_shared():
    x, positions, scale = torch.arange(8).view(4, 2), torch.arange(2)[None], torch.tensor(3.0)
    calls = split((x,), {"positions": positions, "nested": {"labels": [x + 1]}, "scale": scale, "flag": True}, 2)
    assert len(calls) == 2
    (first,), kwargs = calls[1]
    assert torch.equal(first, x[2:])
    assert torch.equal(kwargs["nested"]["labels"][0], x[2:] + 1)
    assert kwargs["positions"] is positions
    assert kwargs["scale"] is scale
    assert kwargs["flag"] is True


@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_a_tensor_that_cannot_be_sharded_is_refused(shape):
    with pytest.raises(UsageError, match="cannot be split"):
        split((torch.zeros(4, 2), torch.zeros(shape)), {}, 2)


def test_nested_values_keep_their_form():
    value = {"a": (torch.ones(1), [torch.ones(1), None]), "b": 1}
    doubled = convert(value, lambda t: t * 2)
    assert doubled == {"a": (torch.tensor([2.0]), [torch.tensor([2.0]), None]), "b": 1}


def test_losses_count_by_target_tokens():
    model = llama()
    weights = LossWeights(model, model.forward)
    labels = torch.tensor([[1, 2, 3, 4], [-100, -100, 3, -100], [1, -100, -100, -100], [5, 6, 7, -100]])
    ids = labels.clamp(min=0)
    calls = split((ids,), {"labels": labels}, 4)
    assert [float(weight) for weight in weights.of(calls)] == pytest.approx(
        [3 / 6, 1 / 6, 0, 2 / 6]
    )  # labels are shifted
    summed = split((ids,), {"labels": labels, "num_items_in_batch": torch.tensor(6)}, 4)
    assert weights.of(summed) == [1.0] * 4
    assert weights.of(split((ids,), {}, 2)) == [0.5, 0.5]


# ---- weight gradients later ------------------------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.first, self.second, self.checkpoints = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), checkpoints

    def body(self, h):
        return self.second(torch.tanh(self.first(self.norm(h)))) + self.first(h)

    def forward(self, ids):
        h = self.embed(ids)
        return checkpoint(self.body, h, use_reentrant=False) if self.checkpoints else self.body(h)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_weight_gradients_come_later_and_are_the_same(checkpoints, autocast):
    torch.manual_seed(0)
    net, ids = Net(checkpoints), torch.randint(7, (3, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = torch.autograd.grad(net(ids).float().pow(2).sum(), list(net.parameters()))
    mode, later = DeferredWgrad(), Later()
    mode.attach(net)
    arrived = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), mode.deferring(later):
        loss = net(ids).float().pow(2).sum()
    with mode.deferring(later):
        loss.backward()
    assert sorted(arrived) == ["embed.weight", "first.bias", "norm.bias", "norm.weight"]
    later.run()
    assert sorted(arrived[4:]) == ["first.weight", "second.weight"]  # each once, although one is used twice
    limits = {"rtol": 0.05, "atol": 0.05} if autocast else {}
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, **limits)


def test_a_transposed_weight_can_wait_too():
    mode, later = DeferredWgrad(), Later()
    x, bias = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.randn(5))
    weight = nn.Parameter(torch.randn(4, 5))
    expected = torch.autograd.grad(torch.addmm(bias, x, weight).pow(2).sum(), [x, weight, bias])
    with mode.deferring(later), mode:
        loss = torch.addmm(bias, x, weight).pow(2).sum()
    loss.backward()
    assert weight.grad is None
    later.run()
    for parameter, gradient in zip((x, weight, bias), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_weight_gradients_are_not_deferred_for_frozen_weights_or_if_not_requested():
    mode = DeferredWgrad()
    x, weight = torch.randn(2, 3, requires_grad=True), nn.Parameter(torch.randn(3, 3))
    with mode:
        F.linear(x, weight).sum().backward()
    assert weight.grad is not None
    later = Later()
    with mode.deferring(later), mode, torch.no_grad():
        assert F.linear(x, weight).grad_fn is None
