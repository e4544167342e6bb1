"""Buffers of a fixed size: exact where none is dropped, and what is dropped above a capacity."""

from __future__ import annotations

import copy
import functools
import importlib.util

import ep_models
import pytest
import torch
from neuron_accel_expert_parallel import ExpertParallelPlugin, expert_load

from neuron_accel import FullyShardedPlugin, NeuronAccelerator, TensorParallelPlugin, Zero1Plugin
from neuron_accel.errors import ConfigurationError, UnsupportedModelError
from neuron_accel.testing import Training, assert_parallel_equivalence, run_ranks

EP2 = ExpertParallelPlugin(expert_parallel_size=2)
FULL = ExpertParallelPlugin(expert_parallel_size=2, capacity_factor=ep_models.EXPERTS / 2)  # a row for each token
STEPS = Training(max_norm=0.5)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_oss", {}),
        pytest.param("mixtral", {}, marks=pytest.mark.slow),
        pytest.param("llama4_text", {"num_experts_per_tok": 2}, marks=pytest.mark.slow),
    ],
    ids=["gpt_oss", "mixtral", "llama4_text"],
)
def test_with_room_for_all_it_trains_like_one_process(family, changes):
    model = functools.partial(ep_models.build, family, **changes)
    plugins = [FULL, TensorParallelPlugin(tensor_parallel_size=2)]
    assert_parallel_equivalence(model, ep_models.batches(3), plugins, ranks=4, training=STEPS)


@pytest.mark.parametrize("plugins", [[EP2, Zero1Plugin()]], ids=["zero1"])
def test_on_the_stand_in_for_the_native_neuron_device(plugins):
    """Whose collectives send chunks of equal size only."""
    pytest.importorskip("neuron_accel_emulation")
    model = functools.partial(ep_models.build, "mixtral", num_hidden_layers=1)
    assert_parallel_equivalence(model, ep_models.batches(3), plugins, ranks=2, training=STEPS, backend="native")


def dropping(chosen: torch.Tensor) -> tuple[float, dict[str, float], str]:
    """With one row for each expert: the largest difference from experts that skip all but its first token."""
    accelerator = NeuronAccelerator(plugins=[ExpertParallelPlugin(expert_parallel_size=2, capacity_factor=0.5)])
    torch.manual_seed(0)
    model = ep_models.mixtral()
    alone = copy.deepcopy(model).model.layers[0].mlp.experts
    model = accelerator.prepare(model)
    torch.manual_seed(accelerator.data_parallel_rank)
    hidden, weights = torch.randn(len(chosen), 32), torch.rand(chosen.shape)
    flat = chosen.flatten().tolist()
    first = torch.tensor([expert not in flat[:place] for place, expert in enumerate(flat)]).view(chosen.shape)
    found = model.model.layers[0].mlp.experts(hidden, chosen, weights)
    error = float((found - alone(hidden, chosen, weights * first)).detach().abs().max())
    return error, expert_load(accelerator, model).metrics(), accelerator.explain(model)


def test_tokens_above_the_capacity_skip_the_expert():
    chosen = torch.tensor([[0, 1], [0, 2], [1, 3], [0, 1]])  # 0.5 x 4 tokens x 2 choices / 4 experts: one row each
    for error, metrics, text in run_ranks(dropping, 2, chosen):
        assert error < 1e-5
        assert metrics["experts/dropped"] == 0.5
        assert "0.5 times their mean number" in text


def uneven_rows(plugin: ExpertParallelPlugin) -> float:
    """The largest difference from all experts on one rank, for a copy of the model, where ranks have other numbers of
    tokens."""
    accelerator = NeuronAccelerator(plugins=[plugin])
    torch.manual_seed(0)
    model = ep_models.mixtral()
    alone = copy.deepcopy(model).model.layers[0].mlp.experts
    copied = copy.deepcopy(accelerator.prepare(model)).model.layers[0].mlp.experts
    tokens = 3 + 2 * accelerator.data_parallel_rank
    hidden, weights = torch.randn(tokens, 32), torch.rand(tokens, 2)
    chosen = torch.arange(2 * tokens).view(tokens, 2) % 4
    return float((copied(hidden, chosen, weights) - alone(hidden, chosen, weights)).detach().abs().max())


@pytest.mark.parametrize("plugin", [FULL, EP2], ids=["padded", "rows"])
def test_ranks_with_other_numbers_of_tokens(plugin):
    assert max(run_ranks(uneven_rows, 2, plugin)) < 1e-5


def test_a_capacity_that_makes_no_sense():
    with pytest.raises(ConfigurationError, match="capacity_factor is 0"):
        ExpertParallelPlugin(expert_parallel_size=2, capacity_factor=0.0)


def own_experts() -> None:
    plugin = ExpertParallelPlugin(expert_parallel_size=2, capacity_factor=1.0, experts=("moe",))
    model = ep_models.OneForAll()
    with pytest.raises(UnsupportedModelError, match="does not say 'has_gate'"):
        NeuronAccelerator(plugins=[plugin]).prepare(model)
    assert model.moe.num_experts == ep_models.EXPERTS, "the model is unchanged"


def test_experts_of_another_form_are_refused():
    run_ranks(own_experts, 2)


# ---- devices that compile --------------------------------------------------------------------------------------------
on_xla = pytest.mark.skipif(not importlib.util.find_spec("torch_xla"), reason="torch_xla is not installed")


@on_xla
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "others", "ranks"),
    [
        ("mixtral", [], 2),
        ("mixtral", [Zero1Plugin()], 4),
        ("mixtral", [FullyShardedPlugin()], 4),
        pytest.param("llama4_text", [], 2, marks=pytest.mark.slow),
    ],
    ids=["ep2", "ep2-dp2-zero1", "ep2-dp2-fully-sharded", "llama4-ep2"],
)
def test_trains_like_one_process_on_xla(family, others, ranks):
    plugins = [EP2, *others]
    model = functools.partial(ep_models.build, family, num_hidden_layers=1)
    assert_parallel_equivalence(
        model, ep_models.batches(3), plugins, ranks=ranks, training=STEPS, backend="xla", timeout=280
    )


def count_graphs() -> list[int]:
    accelerator = NeuronAccelerator(config={"backend": "xla"}, plugins=[EP2])
    torch.manual_seed(0)
    model = ep_models.build("mixtral", num_hidden_layers=1)
    model.set_attn_implementation("eager")  # with a mask, the one that reads no values
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    graphs = []
    for batch in ep_models.batches(4):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        index = accelerator.data_parallel_rank
        loss = model(**{name: value.chunk(2)[index].to(accelerator.device) for name, value in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(accelerator.run.backend.compilations)
    return graphs


@on_xla
@pytest.mark.timeout(300)
def test_a_step_is_one_graph_on_every_rank():
    for graphs in run_ranks(count_graphs, 2, backend="xla", timeout=280):
        assert graphs[-1] == graphs[1] <= 2  # the first step makes the optimizer's state and the counters
