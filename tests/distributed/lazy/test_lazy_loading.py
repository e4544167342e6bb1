"""Models built without memory: how much each rank reads and allocates, and that it gets the right weights."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig

from neuron_accel import ModelParallelismPlugin, NeuronAccelerator, TensorParallelPlugin
from neuron_accel.errors import NeuronAccelError
from neuron_accel.lazy import lazy_load_for_parallelism
from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, compare, train_alone, train_on_rank
from neuron_accel.testing.resources import PeakMemory
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import gpt2_config, llama_config, randomise

TIED = {"tie_word_embeddings": True}
TP2, TP4 = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}
PP2 = {"pipeline_parallel_size": 2, "num_microbatches": 2}


def _configuration(family: str):
    return {
        "gpt2": gpt2_config,
        "llama": llama_config,
        "tied llama": functools.partial(llama_config, **TIED),
        "mixtral": lambda: MixtralConfig(
            **{**llama_config().to_dict(), "num_local_experts": 4, "num_experts_per_tok": 2, "model_type": "mixtral"}
        ),
    }[family]()


def _model(family: str):
    torch.manual_seed(5)
    return randomise(AutoModelForCausalLM.from_config(_configuration(family)))


def _load(folder: str, lazy: bool = True, dtype: torch.dtype | None = None):
    if not lazy:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with lazy_load_for_parallelism():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    return model


def _batches():
    ids = torch.randint(0, 101, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": rows, "labels": rows} for rows in ids]


# ---- the same training -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "ranks", "plugins"),
    [
        ("gpt2", 2, [{"model_parallelism": TP2}]),
        ("tied llama", 4, [{"model_parallelism": TP4}]),  # two key/value heads, each on two ranks
        ("mixtral", 2, [{"model_parallelism": TP2}, "sequence_parallel"]),
        ("gpt2", 4, [{"model_parallelism": {**TP2, **PP2}}]),  # tied over first and last stage
        ("llama", 4, [{"model_parallelism": TP2}, "zero1"]),
        ("tied llama", 4, [{"model_parallelism": TP2}, "fully_sharded"]),
        ("gpt2", 2, [{"fully_sharded": {"persistence_threshold": 200}}]),
    ],
    ids=[
        "gpt2-tp2",
        "tied-llama-tp4",
        "mixtral-tp2-sp",
        "gpt2-tp2-pp2",
        "llama-tp2-zero1",
        "tied-llama-tp2-fully-sharded",
        "gpt2-fully-sharded-keeps-small",
    ],
)
def test_a_model_loaded_lazily_trains_as_one_process_does(family, ranks, plugins, tmp_path):
    _model(family).save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    training = Training(prepare_model=_freeze_first_block) if "fully_sharded" in str(plugins) else Training()
    reference = train_alone(functools.partial(_load, str(tmp_path), False), _batches(), training)
    trace = run_ranks(
        train_on_rank, ranks, functools.partial(_load, str(tmp_path)), _batches(), {"plugins": plugins}, training
    )[0]
    compare(reference, trace)


def _freeze_first_block(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".0." not in name)


# ---- weights, exactly ------------------------------------------------------------------------------------------------
def _weights(build, options, expected) -> None:
    accelerator = NeuronAccelerator(plugins=[ModelParallelismPlugin(**options)])
    model = accelerator.prepare(build())
    weights = accelerator.get_state_dict(model)
    tables = {name: value for name, value in model.named_buffers() if "rotary" in name}
    if accelerator.is_main_process:
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            assert weights[name].dtype == value.dtype, name
            assert torch.equal(weights[name], value), name
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in tables.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_arrive_bit_for_bit_in_the_dtype_asked_for(dtype, tmp_path):
    _model("mixtral").save_pretrained(tmp_path, max_shard_size="40KB")
    expected = _load(str(tmp_path), lazy=False, dtype=dtype).state_dict()
    run_ranks(_weights, 2, functools.partial(_load, str(tmp_path), True, dtype), TP2, expected)


def test_pickled_weights_are_read_the_same_way(tmp_path):
    model = _model("gpt2")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    expected = _load(str(tmp_path), lazy=False).state_dict()
    run_ranks(_weights, 2, functools.partial(_load, str(tmp_path)), TP2, expected)


def _from_config(family: str, lazy: bool):
    torch.manual_seed(11 + int(os.environ.get("RANK", 0)))  # what the first rank draws counts
    if not lazy:
        return AutoModelForCausalLM.from_config(_configuration(family))
    with lazy_load_for_parallelism():
        return AutoModelForCausalLM.from_config(_configuration(family))


@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    [("gpt2", 2, TP2), ("llama", 4, TP4), ("tied llama", 2, PP2), ("gpt2", 1, {})],
    ids=["tp2", "tp4", "pp2", "alone"],
)
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])
def test_initial_weights_do_not_depend_on_the_layout(family, ranks, options, lazy):
    torch.manual_seed(11)
    expected = AutoModelForCausalLM.from_config(_configuration(family)).state_dict()
    run_ranks(_weights, ranks, functools.partial(_from_config, family, lazy), options, expected)


def _refusals(folder: str) -> list[str]:
    messages = []
    for degree, where in ((4, folder), (2, "")):
        accelerator = NeuronAccelerator(plugins=[ModelParallelismPlugin(tensor_parallel_size=2)])
        with lazy_load_for_parallelism(tensor_parallel_size=degree):
            model = AutoModelForCausalLM.from_config(_configuration("llama"))
        if not where and accelerator.state.process_index == 1:
            model.model.norm = torch.nn.LayerNorm(16, device="meta")  # one rank fails, and all say so
        try:
            accelerator.prepare(model)
        except NeuronAccelError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_filled_is_refused_on_every_rank(tmp_path):
    for degrees, unknown in run_ranks(_refusals, 2, str(tmp_path)):
        assert "built for 4 ranks along 'tp', and there are 2" in degrees
        assert "'model.norm.weight'" in unknown


def _with_context(folder: str) -> None:
    accelerator = NeuronAccelerator(plugins=[ModelParallelismPlugin(tensor_parallel_size=2)])
    with accelerator.model_init():
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight.device.type == "meta"
    weights = accelerator.get_state_dict(accelerator.prepare(model))
    if accelerator.is_main_process:
        for name, value in _load(folder, lazy=False).state_dict().items():
            assert torch.equal(weights[name], value)


def _without_parts(folder: str) -> None:
    """Where no plugin keeps a part of the weights on a rank, models are built as usual."""
    accelerator = NeuronAccelerator(plugins=[TensorParallelPlugin(tensor_parallel_size=1)])
    with accelerator.model_init():
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight.device.type == "cpu"


def test_an_accelerator_knows_whether_models_are_built_without_memory(tmp_path):
    _model("llama").save_pretrained(tmp_path)
    run_ranks(_with_context, 2, str(tmp_path))
    run_ranks(_without_parts, 2, str(tmp_path))


def _then_load(folder: str) -> None:
    plugin = ModelParallelismPlugin(tensor_parallel_size=2, checkpoint_dir=folder)
    accelerator = NeuronAccelerator(plugins=[plugin])
    model = accelerator.prepare(_from_config("llama", True))
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for name, value in _load(folder, lazy=False).state_dict().items():
            assert torch.equal(weights[name], value)


def test_weights_that_a_plugin_names_take_the_place_of_initial_ones(tmp_path):
    _model("llama").save_pretrained(tmp_path)
    run_ranks(_then_load, 2, str(tmp_path))


# ---- what is read, and what it takes ---------------------------------------------------------------------------------
MEDIUM = {
    "vocab_size": 8003,  # is padded
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.fixture(scope="module")
def medium(tmp_path_factory):
    """Returns a folder with weights of about 250 MB in several files."""
    folder = tmp_path_factory.mktemp("medium")
    model = LlamaForCausalLM(LlamaConfig(**MEDIUM))
    model.save_pretrained(folder, max_shard_size="70MB")
    assert len(list(folder.glob("*.safetensors"))) >= 4
    _model("llama").save_pretrained(folder / "tiny")
    yield str(folder)
    shutil.rmtree(folder)


def _read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def _costs(folder: str, options: dict, strategy: str) -> dict[str, int]:
    from neuron_accel import FullyShardedPlugin, Zero1Plugin

    further = {"": [], "zero1": [Zero1Plugin()], "fully sharded": [FullyShardedPlugin()]}[strategy]
    accelerator = NeuronAccelerator(plugins=[ModelParallelismPlugin(**options), *further])

    def prepare(model):
        if strategy != "fully sharded":
            return accelerator.prepare(model)
        return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]

    prepare(_load(f"{folder}/tiny"))  # what has to be imported is
    before = _read()
    memory = PeakMemory()
    model = prepare(_load(folder))
    peak = memory.bytes()
    records = accelerator.run.models[-1].parameters
    tensors = [record.current if record.weights is None else record.weights.tensor for record in records]
    held = sum(t.numel() * t.element_size() for t in tensors if t is not None)
    padding = sum(
        max(0, stop - MEDIUM["vocab_size"]) * MEDIUM["hidden_size"] * 4
        for name, p in model.named_parameters()
        if "embed" in name or "lm_head" in name
        for stop in [p.shape[0] * (accelerator.tensor_parallel_rank + 1)]
    )
    return {"read": _read() - before, "peak": peak, "held": held, "wanted": held - padding}


@pytest.mark.parametrize(
    ("ranks", "options", "strategy", "share"),
    [
        (2, TP2, "", 2),
        (4, TP4, "", 4),
        (2, PP2, "", 2),
        (4, TP2, "zero1", 2),
        (2, {}, "fully sharded", 2),
        (4, TP2, "fully sharded", 4),
    ],
    ids=["tp2", "tp4", "pp2", "tp2-zero1", "fully-sharded", "tp2-fully-sharded"],
)
def test_a_rank_reads_only_its_bytes_and_needs_little_more_memory_than_its_shards(
    medium, ranks, options, strategy, share
):
    whole = sum(path.stat().st_size for path in Path(medium).glob("*.safetensors"))
    for cost in run_ranks(_costs, ranks, medium, options, strategy):
        assert cost["held"] < whole / share * 1.02
        assert cost["read"] < cost["wanted"] + 400_000  # lists of files, of mappings, of tensors
        if options not in (TP2, TP4):  # these copy slices out of mappings, which the system does not count
            assert cost["wanted"] <= cost["read"]
        assert cost["peak"] < 1.15 * cost["held"]
