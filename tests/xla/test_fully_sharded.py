"""Fully sharded parameters on a device that compiles whole steps: numbers, and what is in the graph of a step."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from neuron_accel.backends.events import Observer
from neuron_accel.testing import RanksError, run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import MODELS, llama, token_batches
from tests.xla.watching import compiled

STAGE_3, STAGE_2 = {"fully_sharded": {}}, {"fully_sharded": {"reshard_after_forward": False}}
AHEAD = {"fully_sharded": {"prefetch": 2}}
RECOMPUTE = "activation_checkpointing"
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
COMPOSITIONS = {
    "3-dp2-accumulates": ("llama", [{"fully_sharded": {"persistence_threshold": 100}}], 2, 2),
    "2-dp2-tied-recomputes": ("gpt2-tied", [STAGE_2, {RECOMPUTE: {"every": 2}}], 2, 1),
    "3-dp4-in-groups": ("llama", [{"fully_sharded": {"hybrid_shard_size": 2}}], 4, 1),
    "3-dp4-resharded-in-groups": ("frozen", [{"fully_sharded": {"reshard_after_forward": 2}}], 4, 1),
    "3-dp2-frozen": ("frozen", [STAGE_3], 2, 1),
    "3-tp2-sp-dp2-recomputes": ("llama-tied", [TP2, "sequence_parallel", STAGE_3, RECOMPUTE], 4, 1),
}


def mostly_frozen(blocks=2, vocabulary=96, adapters=True):
    """In each block one projection trains."""
    model = llama(blocks=blocks, vocabulary=vocabulary)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(adapters and "q_proj" in name)
    return model


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_trains_like_one_process(composition):
    model, plugins, ranks, accumulation = COMPOSITIONS[composition]
    training = Training(max_norm=0.5, accumulation=accumulation)
    batches = token_batches(2 * accumulation)
    assert_parallel_equivalence(
        (MODELS | {"frozen": mostly_frozen})[model],
        batches,
        plugins,
        ranks=ranks,
        training=training,
        backend="xla",
        timeout=110,
    )


# ---- the graph of a step ---------------------------------------------------------------------------------------------
class Graphs(Observer):
    """Keeps the graphs that are about to be executed, of the tensors that a training keeps: hash and HLO."""

    categories = frozenset({"graph"})

    def __init__(self, kept):
        self.kept, self.found = kept, []

    def begin(self, event):
        import torch_xla

        lib = torch_xla._XLAC
        pending = [tensor for tensor in self.kept() if lib._check_tensor_need_materialization([tensor])[0]]
        if pending:
            self.found.append((lib._get_graph_hash(pending).hex(), lib._get_xla_tensors_hlo_proto(pending)))


def steps(plugins, blocks, make=llama):
    """The hashes of the graphs of three steps, and the last graph; how many graphs had been compiled after each step;
    bytes that are kept between two steps, of the weights and of those of a block."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla", "plugins": plugins})
    with one_at_a_time():
        torch.manual_seed(0)
        model = make(blocks=blocks, vocabulary=32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    backend, graphs = accelerator.run.backend, []

    def kept():
        inner = optimizer.optimizer.inner
        masters = [master for group in inner.param_groups for master in group["params"]]
        moments = [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        weights = [parameter for parameter in model.parameters() if not backend.is_placeholder(parameter)]
        return [tensor for tensor in (*masters, *moments, *weights) if tensor.device.type == "xla"]

    watcher = Graphs(kept)
    backend.events.observe(watcher)
    for batch in token_batches(3, size=accelerator.data_parallel_size, length=4, vocabulary=32):
        size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
        loss = model(**{name: value.chunk(size)[rank].to(accelerator.device) for name, value in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        backend.barrier()  # other ranks count into the same counter
        graphs.append(compiled())
        backend.barrier()
    result = {
        "hashes": [name for name, _ in watcher.found],
        "graph": watcher.found[-1][1],
        "compiled": graphs,
        "kept": sum(tensor.numel() * tensor.element_size() for tensor in kept()),
        "weights": sum(4 * parameter.numel() for parameter in model.parameters()),
        "block": sum(4 * parameter.numel() for parameter in model.model.layers[0].parameters()),
    }
    accelerator.end_training()
    return result


@functools.cache
def found(name, blocks):
    plugins = {"zero1": ["zero1"], "3": [STAGE_3], "2": [STAGE_2], "ahead": [AHEAD], "recomputed": [STAGE_3, RECOMPUTE]}
    plugins |= {"frozen": [STAGE_3], "near": [{"fully_sharded": {"reshard_after_forward": 2}}]}
    make = mostly_frozen if name == "frozen" else llama
    return run_ranks(steps, 4 if name == "near" else 2, plugins[name], blocks, make, backend="xla", timeout=110)


def parsed(graph):
    return pytest.importorskip("neuron_accel_emulation.hlo").parse_module(graph)


def peak(graph):
    return pytest.importorskip("neuron_accel_emulation.hlo_memory").live_bytes(parsed(graph)).peak


def counted(name, blocks):
    module = parsed(found(name, blocks)[0]["graph"])
    count = Counter(instruction.opcode for instruction in module.entry.instructions)
    return count["all-gather"], count["reduce-scatter"], count["opt-barrier"]


def test_what_is_in_the_graph():
    for blocks in (2, 4):
        # a barrier for each gather but that of the model's own parameters and that of the first block beside it
        assert counted("3", blocks) == (2 * blocks + 1, blocks + 1, 2 * blocks - 1)
    assert counted("ahead", 4) == (9, 5, 5), "two blocks beside the model's own, the last two behind that of another"
    assert counted("2", 2) == (3, 3, 1)
    assert counted("recomputed", 2) == (5, 3, 3 + 2), "one more for each recomputation, and no gather"


def test_what_does_not_train_is_gathered_again_for_the_backward_pass():
    for blocks in (2, 4):
        # of each block the projections and the others, in both passes, and those of no block
        assert counted("frozen", blocks)[:2] == (4 * blocks + 1, blocks)
    (two, _), (four, _) = found("frozen", 2), found("frozen", 4)
    peaks = [peak(result["graph"]) for result in (two, four)]
    # a further block costs this rank's half of its weights, not what was gathered of them
    assert peaks[1] - peaks[0] < 2 * 0.75 * four["block"]


@pytest.mark.slow
def test_what_is_resharded_to_groups_is_not_held_in_full():
    for blocks in (2, 4):
        # the barriers of stage 3, and one for each block behind which its parts have been taken
        assert counted("near", blocks) == (2 * blocks + 1, blocks + 1, 3 * blocks - 1)
    two, four = found("near", 2), found("near", 4)
    assert len({name for result in four for name in result["hashes"]}) == 1
    peaks = [peak(result[0]["graph"]) for result in (two, four)]
    # a further block costs a quarter of its weights and of their gradients, and half of it between the passes
    assert peaks[1] - peaks[0] < 2 * 1.1 * four[0]["block"]


def test_one_graph_a_step_and_the_same_on_all_ranks():
    for first, other in (found("3", 2), found("3", 4), found("2", 2)):
        assert first["hashes"] == other["hashes"]
        assert len(set(first["hashes"])) == 1
        assert first["compiled"][-1] == first["compiled"][0] == 1


def test_memory():
    (two, _), (four, _), (zero1, _) = found("3", 2), found("3", 4), found("zero1", 4)
    assert four["kept"] == four["weights"] / 2
    assert zero1["kept"] == zero1["weights"] * 3 / 2
    peaks = [peak(result["graph"]) for result in (two, four, zero1)]
    # a further block costs this rank's half of the weights and of their gradients
    assert peaks[1] - peaks[0] < 2 * 1.25 * four["block"]
    assert peaks[1] < peaks[2] / 2


# ---- checkpoints and loops -------------------------------------------------------------------------------------------
def prepared(plugins, make, precision="no"):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla", "plugins": plugins}, mixed_precision=precision)
    with one_at_a_time():
        torch.manual_seed(0)
        model = llama(vocabulary=32)
        if precision == "bf16":
            model = model.to(torch.bfloat16)
        optimizer = make(model.parameters(), lr=1e-2)
    return (accelerator, *accelerator.prepare(model, optimizer))


def step(accelerator, model, optimizer, batch):
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    loss = model(**{name: value.chunk(size)[rank].to(accelerator.device) for name, value in batch.items()}).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def trained(plugins, precision, save=None, load=None):
    """The weights after two steps, of which a checkpoint was saved or loaded before the second."""
    accelerator, model, optimizer = prepared(plugins, torch.optim.AdamW, precision)
    first, second = token_batches(2, size=2, length=4, vocabulary=32)
    if load is None:
        step(accelerator, model, optimizer, first)
        accelerator.save_state(save)
    else:
        accelerator.load_state(load)
    step(accelerator, model, optimizer, second)
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    return weights


def test_checkpoints_of_zero1_are_loaded_and_the_other_way(tmp_path):
    def run(plugins, **options):
        return run_ranks(trained, 2, plugins, precision="bf16", backend="xla", timeout=110, **options)[0]

    expected = run(["zero1"], save=str(tmp_path / "zero1"))
    found = {
        "stage 3": run([STAGE_3], save=str(tmp_path / "3")),
        "zero1 to stage 3": run([STAGE_3], load=str(tmp_path / "zero1")),
        "stage 3 to zero1": run(["zero1"], load=str(tmp_path / "3")),
    }
    for way, weights in found.items():
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=0, msg=f"{way}: {name}")


def assigning(plugins):
    """Weights that a loop assigns or fills, and evaluation between steps."""
    accelerator, model, optimizer = prepared(plugins, torch.optim.SGD)
    first, second = token_batches(2, size=2, length=4, vocabulary=32)
    step(accelerator, model, optimizer, first)
    norm = model.model.norm.weight
    norm.data = torch.full(norm.shape, 0.5).to(accelerator.device)
    torch.nn.init.constant_(model.model.layers[1].input_layernorm.weight, 0.25)
    with torch.no_grad():
        evaluated = model(**{name: value.to(accelerator.device) for name, value in second.items()}).loss
    step(accelerator, model, optimizer, second)
    weights = accelerator.get_state_dict(model)
    left = [
        name for name, parameter in model.named_parameters() if not accelerator.run.backend.is_placeholder(parameter)
    ]
    return float(evaluated), weights, left


def test_weights_that_a_loop_assigns_are_taken_over():
    loss, expected, _ = run_ranks(assigning, 1, [], backend="xla", timeout=110)[0]
    for found, weights, left in run_ranks(assigning, 2, [STAGE_3], backend="xla", timeout=110):
        assert found == pytest.approx(loss, rel=1e-5)
        assert left == []
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def lazily_loaded(folder, eager):
    """The weights after a step, and bytes that were read while the model was prepared, and those that a rank keeps."""
    from transformers import AutoModelForCausalLM

    from neuron_accel import FullyShardedPlugin, NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla"}, plugins=[FullyShardedPlugin()])
    with nullcontext() if eager else accelerator.model_init():
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu" if eager else "meta"}
    before = bytes_read()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    read = bytes_read() - before
    step(accelerator, model, optimizer, token_batches(1, size=2, length=4, vocabulary=32)[0])
    kept = sum(4 * record.weights.tensor.numel() for record in accelerator.run.models[0].parameters)
    return accelerator.get_state_dict(model), read, kept


def bytes_read():
    """Of this rank, which is a thread."""
    return int(Path("/proc/thread-self/io").read_text().split("rchar: ")[1].split()[0])


def test_a_rank_reads_its_shard_of_a_model_that_was_built_without_memory(tmp_path):
    llama(vocabulary=20_000).save_pretrained(tmp_path)
    found, expected = (
        run_ranks(lazily_loaded, 2, str(tmp_path), eager, backend="xla", timeout=110) for eager in (False, True)
    )
    size = (tmp_path / "model.safetensors").stat().st_size
    for _, read, kept in found:
        assert size / 2 - 20_000 < kept < size / 2
        # It also reads lists of files and mappings, and headers; parts of some weights are mapped, and not read.
        assert 0.8 * kept < read < kept + 400_000
    for name, value in expected[0][0].items():
        torch.testing.assert_close(found[0][0][name], value, rtol=0, atol=0, msg=name)


def unfreezing(plugins):
    """A part of a block begins to train."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla", "plugins": plugins})
    with one_at_a_time():
        torch.manual_seed(0)
        model = mostly_frozen(vocabulary=32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for index, batch in enumerate(token_batches(2, size=2, length=4, vocabulary=32)):
        model.model.layers[0].mlp.requires_grad_(index == 1)
        step(accelerator, model, optimizer, batch)
    left = [name for name, p in model.named_parameters() if not accelerator.run.backend.is_placeholder(p)]
    return accelerator.get_state_dict(model), left


def test_what_begins_to_train():
    expected, _ = run_ranks(unfreezing, 1, [], backend="xla", timeout=110)[0]
    weights, left = run_ranks(unfreezing, 2, [STAGE_3], backend="xla", timeout=110)[0]
    assert left == []
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def reading():
    accelerator, model, optimizer = prepared([STAGE_3], torch.optim.SGD)
    step(accelerator, model, optimizer, token_batches(1, size=2, length=4, vocabulary=32)[0])
    return model.model.norm.weight.cpu()


def test_reading_a_weight_that_has_no_values_is_an_error():
    with pytest.raises(RanksError, match="Trying to access XLA data"):
        run_ranks(reading, 2, backend="xla", timeout=60)
