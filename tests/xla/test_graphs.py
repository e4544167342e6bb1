"""One step, one graph, alike on every rank; and the collectives that are in it."""

from __future__ import annotations

import functools

import pytest
import torch

from neuron_accel.testing import run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import MODELS, token_batches
from tests.xla.hlo import collectives, instructions
from tests.xla.watching import Notes, StepWatcher, compiled, executed, host_fallbacks

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
PLUGINS = {"dp2": ([], 2), "zero1-dp2": (["zero1"], 2), "tp2-dp2-zero1-sp": ([TP2, "sequence_parallel", "zero1"], 4)}
SAMPLES, BATCH, MAX_NORM = 26, 2, 1.0  # of 2 samples on each of 2 ranks: six batches, and half of a seventh


class Texts(torch.utils.data.Dataset):
    def __init__(self, count):
        self.rows = token_batches(count, size=1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {name: value[0] for name, value in self.rows[index].items()}


def adamw(parameters, lr):
    # see neuron_accel.testing.parity for epsilon
    return torch.optim.AdamW(parameters, lr=lr, eps=1e-6)


def sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def epochs(plugins, accumulation, make=adamw, epochs=2):
    """Two epochs as people write them: a loader whose last batch is ragged, a schedule from 0 to 0, clipping,
    accumulation; and every step is logged, printed and shown while it collects. Then the samples are gathered as
    predictions would be."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(
        config={"backend": "xla", "plugins": plugins, "gradient_accumulation_steps": accumulation},
        plugins=[StepWatcher()],
        log_with=[Notes()],
    )
    accelerator.init_trackers("epochs")
    with one_at_a_time():
        torch.manual_seed(0)
        model = MODELS["llama"]()
        optimizer = make(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Texts(SAMPLES), batch_size=BATCH, shuffle=True)
    steps = epochs * len(loader) // accumulation
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, max(steps - step, 0)) / steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    graphs, runs, rates, rows, hashes = [], [], [], [], []
    bar = accelerator.progress(total=epochs * len(loader))
    backend, state = accelerator.run.backend, accelerator.run.state(accelerator.plan.plugin("step_watcher"))
    total = torch.zeros(1).to(accelerator.device)
    for _ in range(epochs):
        for batch in loader:
            before = executed()
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                total += loss.detach()
                accelerator.log({"loss": loss, "total": total})
                accelerator.print("loss", loss)
                bar.set_postfix(loss=loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            bar.update()
            backend.barrier()  # other ranks count into the same counters
            graphs.append(compiled())
            runs.append((executed() - before) / accelerator.world_size)
            backend.barrier()
            rows.append([tuple(row) for row in batch["input_ids"].cpu().tolist()])
    bar.close()
    fallbacks, hashes = host_fallbacks(), list(state["hashes"])
    weights = accelerator.get_state_dict(model)
    ordered = accelerator.prepare(torch.utils.data.DataLoader(Texts(SAMPLES), batch_size=BATCH))
    before, gathered, evaluated = compiled(), [], []
    for batch in ordered:
        gathered += accelerator.gather_for_metrics(batch["input_ids"]).tolist()
        evaluated.append(compiled() - before)
    logged = accelerator.get_tracker("notes").logged if accelerator.is_main_process else []
    result = {
        "graphs": graphs,
        "runs": runs,
        "rows": rows,
        "rates": rates,
        "hashes": hashes,
        "hlo": state["hlo"][-1],
        "fallbacks": fallbacks,
        "logged": logged,
        "weights": weights,
        "gathered": gathered,
        "evaluated": evaluated,
        "masters": [
            [(p.span.length, s.partition.chunk) for p in s.pieces] for s in getattr(optimizer.optimizer, "shards", [])
        ],
    }
    accelerator.end_training()
    return result


@functools.cache
def trained(name, accumulation, make=adamw):
    plugins, ranks = PLUGINS[name]
    return run_ranks(epochs, ranks, plugins, accumulation, make, backend="xla", timeout=150)


def alone(found, accumulation):
    """The same training in plain PyTorch on the same samples in the same order: losses that the main process saw, and
    weights."""
    torch.manual_seed(0)
    model = MODELS["llama"]().train()
    optimizer = adamw(model.parameters(), lr=1e-2)
    per_epoch, losses = len(found[0]["rows"]) // 2, []
    readers = [rank for index, rank in enumerate(found) if index % (len(found) // 2) == 0]
    for index, rate in enumerate(found[0]["rates"]):
        is_last = index % per_epoch == per_epoch - 1
        parts = [torch.tensor(rank["rows"][index]) for rank in readers]
        ids = torch.cat(parts)[: SAMPLES % (2 * BATCH) if is_last else None]
        with torch.no_grad():
            losses.append(model(input_ids=ids[:BATCH], labels=ids[:BATCH]).loss.item())
        (model(input_ids=ids, labels=ids).loss / accumulation).backward()
        if is_last or index % per_epoch % accumulation == accumulation - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", PLUGINS)
def test_an_epoch_is_compiled_once_and_trains_like_one_process(name, accumulation):
    found = trained(name, accumulation)
    first = found[0]
    assert first["graphs"][-1] <= 3
    assert first["graphs"][-1] == first["graphs"][2 * accumulation - 1], "compiled again after the second step"
    assert set(first["runs"]) == {1.0}, "one execution for each micro-batch, however much is logged"
    assert len(set(first["rates"])) > 2, "the schedule did not move"
    assert first["fallbacks"] == []
    check_samples(found)
    for other in found[1:]:
        assert other["hashes"] == first["hashes"]
    assert len(set(first["hashes"][1:])) == 1
    losses, weights = alone(found, accumulation)
    assert [entry["loss"] for entry in first["logged"]] == pytest.approx(losses, rel=1e-4)
    totals = [sum(losses[: i + 1]) for i in range(len(losses))]
    assert [entry["total"] for entry in first["logged"]] == pytest.approx(totals, rel=1e-4)
    for name_, value in weights.items():
        torch.testing.assert_close(first["weights"][name_], value, rtol=1e-3, atol=2e-4)


def check_samples(found):
    """In each epoch every sample is read; ranks of one data-parallel rank read the same; metrics get each once."""
    batches = len(found[0]["rows"]) // 2
    orders = []
    for epoch in range(2):
        read = [[tuple(b) for b in rank["rows"][epoch * batches : (epoch + 1) * batches]] for rank in found]
        assert len({row for rank in read for batch in rank for row in batch}) == SAMPLES
        assert len({tuple(rank) for rank in read}) == 2, "two data-parallel ranks"
        orders.append(read)
    assert orders[0] != orders[1], "the same order in both epochs"
    for rank in found:
        assert rank["gathered"] == [sample["input_ids"].tolist() for sample in Texts(SAMPLES)]
        assert rank["evaluated"][-1] == rank["evaluated"][0] <= 1, "the ragged batch was another graph"


def test_sgd_with_momentum_is_compiled_once():
    found = trained("zero1-dp2", 1, sgd)[0]
    assert found["graphs"][-1] == found["graphs"][1] <= 3


def test_zero1_scatters_gradients_and_gathers_weights_once():
    found = trained("zero1-dp2", 1)[0]
    calls = collectives(found["hlo"])
    (pieces,) = found["masters"]  # one bucket
    chunk = pieces[0][1]
    assert sum(length for length, _ in pieces) == chunk
    assert {call.groups for call in calls} == {((0, 1),)}
    by_op = {op: [c.size for c in calls if c.op == op] for op in {c.op for c in calls}}
    assert by_op["reduce-scatter"] == [2 * 4 * chunk]
    assert by_op["all-gather"] == [4 * chunk]
    assert all(size <= 8 for size in by_op.get("all-reduce", [])), "only norms are all-reduced"


def test_data_parallel_reduces_each_gradient_once():
    calls = collectives(trained("dp2", 1)[0]["hlo"])
    parameters = sum(p.numel() for p in MODELS["llama"]().parameters())
    assert {call.op for call in calls} == {"all-reduce"}
    token = 4  # orders collectives, one operand of each
    assert sum(call.size - token for call in calls) == 4 * parameters


def test_groups_are_those_of_the_plan():
    calls = collectives(trained("tp2-dp2-zero1-sp", 1)[0]["hlo"])
    tp, dp, world = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)
    assert {call.groups for call in calls} <= {tp, dp, world}, "Neuron allows at most 12 distinct ones in a graph"
    between = [call for call in calls if call.groups == dp]
    assert {call.op for call in between if call.size > 8} == {"reduce-scatter", "all-gather"}, "beside a norm"
    within = [call for call in calls if call.groups == tp]
    activation = 4 * 2 * 12 * 32  # what a sequence-parallel region would all-reduce: fp32 [batch, sequence, hidden]
    # two regions a layer are left by a scatter forward and backward, and entered by a gather, which the backward pass
    # repeats; so is the head, without the repetition
    assert [c.size for c in within if c.op == "reduce-scatter"] == [activation] * 8
    assert [c.size for c in within if c.op == "all-gather"] == [activation // 2] * 14
    # outside the regions whole activations are summed: the embedding's output, and the gradient of the head's input
    assert [max(c.sizes) for c in within if c.op == "all-reduce"].count(activation) == 2


def test_the_reader_of_hlo():
    text = (
        "  %all-reduce.5 = (f32[4]{0}, f32[2,3]{1,0}) all-reduce(f32[4]{0} %a, f32[2,3]{1,0} %b), "
        "replica_groups={{0,1},{2,3}}, to_apply=%add\n"
        "  ROOT %all-gather.7 = bf16[8]{0} all-gather(bf16[4]{0} %c), replica_groups={{0,1}}, dimensions={0}\n"
    )
    first, second = collectives(text)
    assert (first.op, first.groups, first.sizes) == ("all-reduce", ((0, 1), (2, 3)), (16, 24))
    assert (second.op, second.groups, second.size) == ("all-gather", ((0, 1),), 8)
    assert instructions(text) == 2


def dropping():
    """Three steps of a sharded model with dropout inside and outside its regions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla", "plugins": [TP2]}, plugins=[StepWatcher()])
    with one_at_a_time():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator.run.backend.generator.seed(1)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = {name: value.to(accelerator.device) for name, value in token_batches(1)[0].items()}
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.cpu()))
    weights = {n: p.detach().cpu() for n, p in model.named_parameters() if "ln_" in n}  # whole on every rank
    hashes = accelerator.run.state(accelerator.plan.plugin("step_watcher"))["hashes"]
    return losses, weights, hashes, compiled()


def test_dropout_in_a_sharded_model_is_data():
    (losses, weights, hashes, graphs), other = run_ranks(dropping, 2, backend="xla", timeout=110)
    assert graphs == 2
    assert hashes == other[2]
    assert losses == other[0]
    assert len(set(losses)) == 3
    for name, value in weights.items():
        assert torch.equal(value, other[1][name]), f"{name} drifts apart: ranks drew different numbers outside regions"
