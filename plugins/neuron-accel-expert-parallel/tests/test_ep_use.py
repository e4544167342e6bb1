"""What users meet: families, checkpoints, lazy loading, explain, the load, bytes on the wire, and refusals."""

from __future__ import annotations

import copy

import ep_models
import pytest
import torch
from neuron_accel_expert_parallel import ExpertParallelPlugin, expert_load
from neuron_accel_expert_parallel.families import FAMILIES
from torch import nn

from neuron_accel import FullyShardedPlugin, NeuronAccelerator, TensorParallelPlugin, Zero1Plugin
from neuron_accel.errors import ConfigurationError, NeuronAccelError
from neuron_accel.testing import RanksError, run_ranks

EP2 = ExpertParallelPlugin(expert_parallel_size=2)
SHARDED = FullyShardedPlugin()


def share(batch: dict[str, torch.Tensor], accelerator: NeuronAccelerator) -> dict[str, torch.Tensor]:
    """This rank's samples of a global batch."""
    index, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
    return {name: value.chunk(size)[index] for name, value in batch.items()}


# ---- families --------------------------------------------------------------------------------------------------------
def errors_of(families: list[str], others: list) -> dict[str, float]:
    """For each family the largest error of the loss and of a gradient, relative to the largest entry; with the
    load-balancing loss of those that have one."""
    accelerator = NeuronAccelerator(plugins=[EP2, *others])
    results = {}
    (batch,) = ep_models.batches(1)
    for family in families:
        torch.manual_seed(0)
        model = ep_models.build(family, output_router_logits=True, router_aux_loss_coef=0.5)
        alone = copy.deepcopy(model)
        prepared = accelerator.prepare(model)
        expected = alone(**batch).loss
        expected.backward()
        loss = prepared(**share(batch, accelerator)).loss
        accelerator.backward(loss)
        gradients = accelerator.get_gradients(prepared)
        errors = [float(abs(accelerator.reduce(loss.detach(), "mean") - expected) / expected)]
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None:
                scale = parameter.grad.abs().max().clamp(min=1e-4)
                errors.append(float((gradients[name] - parameter.grad).abs().max() / scale))
        results[family] = max(errors)
        accelerator.free_memory()
    return results


@pytest.mark.parametrize(
    ("families", "others", "ranks"),
    [
        (ep_models.FAMILIES, [], 2),
        pytest.param(ep_models.MORE, [], 2, marks=pytest.mark.slow),
        pytest.param(ep_models.FAMILIES, [TensorParallelPlugin(tensor_parallel_size=2)], 4, marks=pytest.mark.slow),
    ],
    ids=["families", "more", "families-tp2"],
)
def test_families(families, others, ranks):
    errors = run_ranks(errors_of, ranks, list(families), others, timeout=110)[0]
    assert not {family: error for family, error in errors.items() if not error < 1e-4}


def test_every_family_is_tried():
    assert FAMILIES.keys() == {*ep_models.FAMILIES, *ep_models.MORE}


# ---- checkpoints and lazy loading ------------------------------------------------------------------------------------
def trained(
    steps: slice, plugins, *, saved: str | None = None, loaded: str | None = None, lazily_from: str | None = None
) -> dict[str, torch.Tensor]:
    """Weights after the steps, in full."""
    accelerator = NeuronAccelerator(plugins=plugins)
    torch.manual_seed(0 if loaded is None else 1)
    model = ep_models.mixtral() if lazily_from is None else loaded_lazily(lazily_from, accelerator)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if loaded:
        accelerator.load_state(loaded)
    for batch in ep_models.batches(4)[steps]:
        accelerator.backward(model(**share(batch, accelerator)).loss)
        optimizer.step()
        optimizer.zero_grad()
    if saved:
        accelerator.save_state(saved)
    return accelerator.get_state_dict(model)


def loaded_lazily(folder: str, accelerator: NeuronAccelerator) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with accelerator.model_init():
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(parameter.is_meta for parameter in model.parameters()), "it takes memory before it is sharded"
    return model


def close(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "others",
    [pytest.param([], marks=pytest.mark.slow), pytest.param([Zero1Plugin()], marks=pytest.mark.slow), [SHARDED]],
    ids=["plain", "zero1", "fully-sharded"],
)
def test_a_checkpoint_loads_on_any_mesh(tmp_path, others):
    expected = run_ranks(trained, 1, slice(0, 4), [])[0]
    run_ranks(trained, 4, slice(0, 2), [EP2, *others], saved=str(tmp_path / "ep2-dp2"))
    close(run_ranks(trained, 1, slice(2, 4), [], loaded=str(tmp_path / "ep2-dp2"))[0], expected)
    run_ranks(trained, 1, slice(0, 2), [], saved=str(tmp_path / "one"))
    close(run_ranks(trained, 2, slice(2, 4), [EP2, *others], loaded=str(tmp_path / "one"))[0], expected)


def experts_of(folder: str) -> dict[str, torch.Tensor]:
    """This rank's shards of the experts."""
    accelerator = NeuronAccelerator(plugins=[EP2])
    model = accelerator.prepare(loaded_lazily(folder, accelerator))
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".experts." in name}


def test_a_rank_loads_its_own_experts(tmp_path):
    model = ep_models.mixtral()
    model.save_pretrained(tmp_path)
    weights = model.state_dict()
    for rank, shards in enumerate(run_ranks(experts_of, 2, str(tmp_path))):
        assert len(shards) == 4
        for name, shard in shards.items():
            assert torch.equal(shard, weights[name].chunk(2)[rank])


def test_a_lazily_loaded_model_trains_fully_sharded(tmp_path):
    """Experts are read in shards over one axis, all other parameters over both."""
    torch.manual_seed(0)
    ep_models.mixtral().save_pretrained(tmp_path)
    expected = run_ranks(trained, 1, slice(0, 2), [])[0]
    close(run_ranks(trained, 4, slice(0, 2), [EP2, SHARDED], lazily_from=str(tmp_path))[0], expected)


# ---- ranks without tokens --------------------------------------------------------------------------------------------
def gradients_with(rows: list[int]) -> dict[str, torch.Tensor]:
    """Gradients of a sum over samples, of which each rank has that many."""
    accelerator = NeuronAccelerator(plugins=[ExpertParallelPlugin(expert_parallel_size=len(rows), experts=("moe",))])
    torch.manual_seed(0)
    model = accelerator.prepare(ep_models.OneForAll())
    (batch,) = ep_models.vectors(1)
    x = batch["x"].split(rows)[accelerator.data_parallel_rank]
    chosen = torch.arange(2 * len(x)).view(-1, 2) % 3  # never the last expert
    hidden = model.first(x)
    accelerator.backward(model.moe(hidden, chosen, torch.sigmoid(hidden[:, :2])).square().sum() * len(rows))
    return accelerator.get_gradients(model)


def test_a_rank_without_tokens():
    """Rank 0 has all samples, or rank 1 has: ranks still compute for each other, and gradients are those of the sum."""
    first, second = (run_ranks(gradients_with, 2, rows)[0] for rows in ([8, 0], [0, 8]))
    assert first["moe.up"][:3].abs().amax((1, 2)).min() > 0
    assert first["moe.up"][3].abs().max() == 0
    close(second, first)


# ---- what is said and counted ----------------------------------------------------------------------------------------
def described() -> tuple[str, str, dict[str, float], dict[str, float], int]:
    accelerator = NeuronAccelerator(plugins=[EP2])
    torch.manual_seed(0)
    model = ep_models.mixtral()
    before = accelerator.explain(model)
    model = accelerator.prepare(model)
    (batch,) = ep_models.batches(1)
    model(**share(batch, accelerator))
    after = accelerator.explain(model)
    load = expert_load(accelerator, model)
    total = {int(tokens.sum()) for tokens in load.tokens.values()}
    return before, after, load.metrics(), expert_load(accelerator, model).metrics(), total.pop()


def test_explain_and_the_load():
    results = run_ranks(described, 2)
    for before, after, metrics, later, total in results:
        assert "Expert parallelism over 2 ranks: 2 of 4 experts on each, in 2 layers" in before
        assert "Shard(0) over ep" in before
        assert "model.layers.1.mlp.experts: of this rank's 40 choices" in after
        assert total == 4 * ep_models.LENGTH * 2, "choices of both ranks"
        assert 1 <= metrics["experts/busiest_rank"] <= metrics["experts/busiest_expert"] <= 4
        assert later == {}
    assert results[0][2] == results[1][2]


def sent_by(chosen: torch.Tensor) -> tuple[int, int]:
    """Bytes that this rank sends in a forward and a backward pass of one layer, without and with its backward pass."""
    accelerator = NeuronAccelerator(plugins=[ExpertParallelPlugin(expert_parallel_size=2, experts=("moe",))])
    torch.manual_seed(0)
    model = accelerator.prepare(ep_models.OneForAll())
    hidden = torch.randn(len(chosen), 6, requires_grad=True)
    with accelerator.run.backend.record() as traffic:
        out = model.moe(hidden, chosen, torch.ones(chosen.shape))
        forward = traffic.sent(op="all_to_all_uneven", group="ep")
        out.sum().backward()
    return forward, traffic.sent(op="all_to_all_uneven", group="ep") - forward


def test_a_token_is_sent_once_to_each_rank_that_needs_it():
    chosen = torch.tensor([[0, 1], [2, 3], [0, 2], [3, 1]])  # experts 0 and 1 are on rank 0
    for forward, backward in run_ranks(sent_by, 2, chosen):
        rows, row = 3, 6 * 4  # three tokens need the other rank: the least that can be sent is a row of each
        names = rows * 2 * (4 + 4)  # the experts of each, int32, and their weights
        assert forward == 2 * rows * row + names
        assert backward == 2 * rows * row


def sent_by_llama4(experts_per_token: int) -> tuple[int, int, float]:
    """Rows that this rank sends in a forward pass of a mixture, how many of its tokens' choices are of the other rank's
    experts, and the largest difference from the same mixture in one process."""
    accelerator = NeuronAccelerator(plugins=[EP2])
    torch.manual_seed(0)
    model = ep_models.build("llama4_text", num_hidden_layers=1, num_experts_per_tok=experts_per_token)
    alone = copy.deepcopy(model).model.layers[0].feed_forward
    mixture = accelerator.prepare(model).model.layers[0].feed_forward
    torch.manual_seed(accelerator.data_parallel_rank)
    hidden = torch.randn(1, 12, 32)
    with torch.no_grad(), accelerator.run.backend.record() as traffic:
        found, expected = mixture(hidden)[0], alone(hidden)[0]
        chosen = alone.router(hidden[0])[0] > 0  # [tokens, experts]
    other = chosen.chunk(2, 1)[1 - accelerator.data_parallel_rank]
    sent = traffic.sent(op="all_to_all_uneven", group="ep")
    names = int(other.sum()) * (4 + 4)  # the expert of each, int32, and its weight
    rows, rest = divmod(sent - names, 32 * 4)
    assert rest == 0
    return rows, int(other.sum()), float((found - expected).abs().max())


@pytest.mark.parametrize("experts_per_token", [1, 2])
def test_llama4_sends_the_chosen_tokens_only(experts_per_token):
    results = run_ranks(sent_by_llama4, 2, experts_per_token)
    sent, chosen = (sum(each[i] for each in results) for i in (0, 1))
    assert sent == 2 * chosen, "once there and once back, on one rank or the other"
    assert 0 < chosen < 24 * experts_per_token
    assert max(error for *_, error in results) < 1e-5


# ---- refusals --------------------------------------------------------------------------------------------------------
class Listed(nn.Module):
    """Experts as modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])


def refusal_of(model: nn.Module, plugin: ExpertParallelPlugin) -> str:
    accelerator = NeuronAccelerator(plugins=[plugin])
    try:
        accelerator.prepare(model)
    except NeuronAccelError as error:
        return str(error)
    return ""


def with_a_buffer() -> nn.Module:
    model = ep_models.OneForAll()
    model.moe.register_buffer("bias", torch.zeros(4))
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (ep_models.OneForAll(), {}, "It is not known where the experts of OneForAll are"),
        (ep_models.OneForAll(), {"experts": ("blocks.*.moe",)}, "No module of OneForAll matches 'blocks.*.moe'"),
        (Listed(), {"experts": ("experts",)}, "each expert is a module of its own"),
        (ep_models.OneForAll(), {"experts": ("first",)}, "no attribute `num_experts`"),
        (with_a_buffer(), {"experts": ("moe",)}, "it has a buffer 'bias'"),
    ],
)
def test_what_is_refused(model, options, message):
    plugin = ExpertParallelPlugin(expert_parallel_size=2, **options)
    assert all(message in refusal for refusal in run_ranks(refusal_of, 2, model, plugin))


def test_an_uneven_number_of_experts_is_refused():
    plugin = ExpertParallelPlugin(expert_parallel_size=3, experts=("moe",))
    assert "divides 4" in run_ranks(refusal_of, 3, ep_models.OneForAll(), plugin)[0]


def test_a_size_that_makes_no_sense():
    with pytest.raises(ConfigurationError, match="expert_parallel_size is 0"):
        ExpertParallelPlugin(expert_parallel_size=0)


def called_with(kind: str) -> None:
    accelerator = NeuronAccelerator(plugins=[EP2])
    model = accelerator.prepare(ep_models.balanced())
    (batch,) = ep_models.batches(1)
    if kind == "tuple":
        model(**batch, return_dict=False)
    elif kind == "rows":
        model.model.layers[0].mlp.experts(torch.zeros(2, 3, 32), torch.zeros(6, 2).long(), torch.zeros(6, 2))
    else:
        expert_load(accelerator, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tuple", "output_router_logits is not possible with return_dict=False"),
        ("rows", "were called with"),
        ("load", "was not prepared with expert parallelism"),
    ],
)
def test_calls_that_are_refused(kind, message):
    with pytest.raises(RanksError, match=message):
        run_ranks(called_with, 2, kind)


def uneven() -> None:
    accelerator = NeuronAccelerator(plugins=[EP2])
    model = accelerator.prepare(ep_models.mixtral())
    (batch,) = ep_models.batches(1)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for _ in range(1 + accelerator.data_parallel_rank):
            accelerator.backward(model(**batch).loss)


def test_a_rank_that_has_run_out_of_data_is_not_waited_for():
    with pytest.raises(RanksError, match="sending tokens to experts is not possible while some ranks have run out"):
        run_ranks(uneven, 2, timeout=30)


# ---- torch.compile ---------------------------------------------------------------------------------------------------
def compiled(way: str) -> tuple[float, list[int]]:
    """The largest difference of gradients from one process over three steps, and the graphs after each."""
    from torch._dynamo.utils import counters

    accelerator = NeuronAccelerator(plugins=[EP2], dynamo_backend="eager" if way == "prepare" else None)
    torch.manual_seed(0)
    model = ep_models.build("mixtral", num_hidden_layers=1, output_router_logits=True)
    alone = copy.deepcopy(model)
    prepared = accelerator.prepare(model)
    used = torch.compile(prepared, backend="eager") if way == "after" else prepared
    errors, graphs = [], []
    for batch in ep_models.batches(3):
        alone(**batch).loss.backward()
        accelerator.backward(used(**share(batch, accelerator)).loss)
        gradients = accelerator.get_gradients(prepared)
        for name, parameter in alone.named_parameters():
            errors.append(float((gradients[name] - parameter.grad).abs().max()))
        alone.zero_grad()
        prepared.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    return max(errors), graphs


@pytest.mark.slow
@pytest.mark.parametrize("way", ["after", "prepare"])
def test_a_compiled_model(way):
    for error, graphs in run_ranks(compiled, 2, way, timeout=110):
        assert error < 1e-5
        assert 0 < graphs[0] <= graphs[1] == graphs[2], "nothing is compiled again for other numbers of tokens"
