"""torch.compile with strategies gives the results of one process, and does not compile again in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neuron_accel.errors import UsageError
from neuron_accel.testing import RanksError, Tolerance, Trace, Training, compare, run_ranks, train_alone
from neuron_accel.testing._cases import tiny_llama, token_batches
from neuron_accel.testing.parity import loader_of, loss_of
from tests.distributed.backends.test_collectives import connect

STEPS = 3
TRAINING = Training(max_norm=0.5)
FLASH = {"flash_attention": {"block_size": 5}}
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
PP2 = {"model_parallelism": {"pipeline_parallel_size": 2}}
COMPOSITIONS = {
    "dp2-flash": [FLASH],
    "zero1-recompute": ["zero1", "activation_checkpointing"],
    "tp2-sp": [TP2, "sequence_parallel"],
    "tp2-sp-overlapping": [TP2, {"sequence_parallel": {"overlap_gather": True}}],
    "pp2": [PP2],
}


class Counting:
    """A backend of torch.compile that compiles nothing and counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def train(plugins: list[Any], way: str) -> tuple[Trace | None, list[int]]:
    """The results on rank 0, and the number of graphs after each step."""
    from torch._dynamo.utils import counters

    from neuron_accel import NeuronAccelerator

    counting = Counting()
    accelerator = NeuronAccelerator(config={"plugins": plugins}, dynamo_backend="eager" if way == "plugin" else None)
    torch.manual_seed(0)
    model = tiny_llama()
    model.train()
    optimizer = TRAINING.optimizer(model.parameters())
    if way == "before":
        model = torch.compile(model, backend=counting)
    loader = loader_of(token_batches(STEPS), accelerator.data_parallel_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    used = torch.compile(model, backend=counting) if way == "after" else model
    losses, norms, graphs = [], [], []
    for batch in loader:
        loss = loss_of(used(**batch))
        accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach(), "mean"))
        norms.append(accelerator.clip_grad_norm_(model.parameters(), TRAINING.max_norm))
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"] if way == "plugin" else counting.graphs)
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    if not accelerator.is_main_process:
        return None, graphs
    return Trace([float(x) for x in losses], [float(x) for x in norms], {}, weights), graphs


def check(plugins: list[Any], way: str, backend: str) -> list[int]:
    """Trains on two ranks like one process, and compiles nothing after the second step; graphs of each rank."""
    trace = run_ranks(train_alone, 1, tiny_llama, token_batches(STEPS), TRAINING, backend=None)[0]
    results = run_ranks(train, 2, plugins, way, timeout=220, backend=backend)
    compare(Trace(trace.losses, trace.norms, {}, trace.weights), results[0][0], Tolerance())
    for _, graphs in results:
        assert graphs[0] > 0, "nothing was compiled"
        assert graphs[-1] == graphs[1], f"compiled again in later steps: {graphs}"
    return [graphs[-1] for _, graphs in results]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("way", "composition"), [("plugin", "zero1-recompute"), *(("after", c) for c in COMPOSITIONS)])
def test_a_compiled_model_trains_like_one_process(way, composition):
    graphs = check(COMPOSITIONS[composition], way, "gloo")
    if composition == "dp2-flash":
        assert graphs == [2, 2], (
            "the model's hook before buffers are sent, and the model, in which ranks do not communicate"
        )


def communicate() -> tuple[list[list[Any]], int]:
    """What a compiled function with collectives in it returns, three times, and its graphs."""
    backend, group = connect()
    counting = Counting()

    @torch.compile(backend=counting)
    def function(x: torch.Tensor) -> Any:
        total = backend.all_reduce(x * 2, group)
        names = backend.all_gather_object(f"rank {backend.rank}", group)
        pending = backend.start_all_gather(total + 1, group)
        return names, pending.wait() * x.sum()

    results = []
    for _ in range(3):
        names, gathered = function(torch.arange(2.0, device=backend.device) + backend.rank)
        results.append([names, gathered.tolist()])
    backend.shutdown()
    return results, counting.graphs


def check_communication(backend: str) -> None:
    gathered = [3.0, 7.0] * 2
    for own, (results, graphs) in zip((1, 3), run_ranks(communicate, 2, backend=backend), strict=True):
        assert results == [[["rank 0", "rank 1"], [value * own for value in gathered]]] * 3
        assert graphs == 3, "before the first collective, between two, after the last"


def test_a_graph_ends_at_a_collective():
    check_communication("gloo")


def test_a_model_that_is_compiled_before_it_is_prepared_is_refused():
    with pytest.raises(RanksError) as caught:
        run_ranks(train, 2, (), "before")
    for error in caught.value.errors.values():
        assert isinstance(error, UsageError)
        assert "compiled by torch.compile before it was prepared" in error.what
        assert "dynamo_plugin" in error.fix


def methods_on_rank(plugins: list[Any]) -> tuple[bool, ...]:
    """Methods of the accelerator accept the compiled model as they accept the prepared one."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    torch.manual_seed(0)
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, TRAINING.optimizer(model.parameters()))
    compiled = torch.compile(model, backend="eager")
    record = accelerator.run.prepared(model)
    assert record is not None
    batch = {name: value[accelerator.process_index :][:2] for name, value in token_batches(1)[0].items()}
    with accelerator.no_sync(compiled):
        found = [not record.sync_enabled]
    with accelerator.join_uneven_inputs([compiled], even_batches=False):
        found.append(accelerator.run.join.is_uneven)
        accelerator.backward(loss_of(compiled(**batch)))
        optimizer.step()
    gradients, expected = accelerator.get_gradients(compiled), accelerator.get_gradients(model)
    found.append(bool(gradients) and all(torch.equal(gradients[name], expected[name]) for name in expected))
    weights, expected = accelerator.get_state_dict(compiled), accelerator.get_state_dict(model)
    found.append(list(weights) == list(expected) and all(map(torch.equal, weights.values(), expected.values())))
    found.append(accelerator.prepare(compiled) is compiled)
    return tuple(found)


def test_methods_take_the_compiled_model_for_the_prepared_one():
    assert run_ranks(methods_on_rank, 2, ["zero1"], timeout=110) == [(True,) * 5] * 2
