"""What trains on several ranks is what plain peft trains in one process, and peft can load it."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lora_support import alone, assert_alike, batches, close, gpt2, llama, on_rank
from neuron_accel_lora import LoraPlugin, extract_adapter, save_adapter
from peft import PeftModel
from safetensors.torch import load_file

from neuron_accel import (
    ActivationCheckpointingPlugin,
    FullyShardedPlugin,
    ModelParallelismPlugin,
    NeuronAccelerator,
    SequenceParallelPlugin,
    Zero1Plugin,
)
from neuron_accel.errors import CheckpointError
from neuron_accel.testing import run_ranks

LLAMA = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "embed_tokens",
        "lm_head",
    ],
}
GPT2 = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "wte"]}
RICH = {  # ranks and scalings of their own, trained biases, a module that trains as it is
    **GPT2,
    "use_rslora": True,
    "rank_pattern": {"c_attn": 2},
    "alpha_pattern": {"c_fc": 3},
    "bias": "lora_only",
    "modules_to_save": ["ln_f"],
}


def tp(size: int, **options) -> ModelParallelismPlugin:
    return ModelParallelismPlugin(tensor_parallel_size=size, **options)


def pp(**options) -> ModelParallelismPlugin:
    return ModelParallelismPlugin(pipeline_parallel_size=2, num_microbatches=2, **options)


def _train(build, options: dict, plugins: list, ranks: int, folder: Path) -> tuple[dict, list[dict]]:
    reference = alone(build(), options, batches())
    given = [LoraPlugin(peft_config=options, trainable_parameters=reference["count"]), *plugins]
    results = run_ranks(on_rank, ranks, build, given, batches(), str(folder), timeout=110)
    assert_alike(reference, results, folder)
    return reference, results


def test_recomputed_blocks_whose_inputs_need_no_gradient(tmp_path: Path) -> None:
    options = {**GPT2, "target_modules": [name for name in GPT2["target_modules"] if name != "wte"]}
    _train(gpt2, options, [tp(2), SequenceParallelPlugin(), ActivationCheckpointingPlugin()], 2, tmp_path)


def test_tensor_and_data_parallel_with_zero1_is_one_process(tmp_path: Path) -> None:
    """Five steps; column- and row-parallel layers, shared key/value heads, embedding and head with padding."""
    reference, results = _train(llama, LLAMA, [tp(2), Zero1Plugin()], 4, tmp_path)
    base = sum(p.numel() for name, p in llama().named_parameters())
    for result in results:
        assert result["held"] < reference["count"]  # an optimizer's state is for adapters, cut or not
        # what data-parallel ranks exchange: gradients of adapters out, their weights back, and a few numbers
        assert 4 * result["held"] <= result["data_bytes"] < 2 * 4 * result["held"] < 2 * base
    assert not results[0]["changed"]
    loaded = PeftModel.from_pretrained(llama(), tmp_path)
    ids = batches()[0]["input_ids"]
    with torch.no_grad():
        expected = reference["model"].eval()(input_ids=ids).logits
        assert torch.allclose(loaded.eval()(input_ids=ids).logits, expected, atol=2e-4)
        assert torch.allclose(loaded.merge_and_unload()(input_ids=ids).logits, expected, atol=2e-4)


@pytest.mark.parametrize(
    ("build", "options", "plugins", "ranks"),
    [
        pytest.param(gpt2, RICH, [tp(2), SequenceParallelPlugin(), Zero1Plugin()], 4, id="fused-sp-zero1"),
        pytest.param(
            functools.partial(llama, heads=6, groups=3, features=50), LLAMA, [tp(2)], 2, id="padded-heads-and-features"
        ),
        pytest.param(llama, LLAMA, [FullyShardedPlugin()], 2, id="fully-sharded"),
        pytest.param(
            gpt2, RICH, [tp(2), FullyShardedPlugin(), ActivationCheckpointingPlugin()], 4, id="fully-sharded-tp2"
        ),
        pytest.param(llama, LLAMA, [tp(4), SequenceParallelPlugin()], 4, id="more-ranks-than-groups"),
        pytest.param(gpt2, GPT2, [pp(tensor_parallel_size=2, schedule="zero-bubble")], 4, id="zero-bubble-tp2"),
        pytest.param(
            llama,
            {"r": 2, "target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1], "layers_pattern": "layers"},
            [pp(), Zero1Plugin()],
            4,
            id="a-stage-without-adapters",
        ),
    ],
)
def test_compositions_are_one_process(build, options: dict, plugins: list, ranks: int, tmp_path: Path) -> None:
    _train(build, options, plugins, ranks, tmp_path)


XLA = [
    pytest.mark.skipif(not importlib.util.find_spec("torch_xla"), reason="torch_xla is not installed"),
    pytest.mark.timeout(300),  # most of it is spent compiling
]


@pytest.mark.parametrize(
    ("build", "options", "plugins", "ranks"),
    [
        pytest.param(llama, LLAMA, [FullyShardedPlugin()], 2, id="fully-sharded-xla", marks=XLA),
        pytest.param(
            gpt2,
            RICH,
            [tp(2), FullyShardedPlugin(reshard_after_forward=False), ActivationCheckpointingPlugin()],
            4,
            id="stage-2-tp2-xla",
            marks=[*XLA, pytest.mark.slow],
        ),
    ],
)
def test_weights_under_adapters_are_sharded_on_xla_ranks(build, options: dict, plugins: list, ranks: int, tmp_path):
    reference = alone(build(), options, batches())
    given = [LoraPlugin(peft_config=options, trainable_parameters=reference["count"]), *plugins]
    results = run_ranks(on_rank, ranks, build, given, batches(), str(tmp_path), backend="xla", timeout=280)
    assert_alike(reference, results, tmp_path)
    assert options is RICH or not results[0]["changed"]  # RICH trains biases and a module as well


def _fully_sharded(folder: str, save: bool) -> tuple[dict, int, int]:
    """Weights after two steps, of which a checkpoint was saved or loaded before the second; elements that this rank
    keeps, and those of the model."""
    sharding = FullyShardedPlugin() if save else Zero1Plugin()
    accelerator = NeuronAccelerator(plugins=[LoraPlugin(**GPT2), sharding])
    torch.manual_seed(7)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6))
    data = batches()
    if not save:
        accelerator.load_state(folder)
    for index in (0, 1) if save else (1,):
        rank = accelerator.data_parallel_rank
        share = {name: value.chunk(2)[rank] for name, value in data[index].items()}
        accelerator.backward(model(**share).loss)
        optimizer.step()
        optimizer.zero_grad()
        if save and index == 0:
            accelerator.save_state(folder)
    records = list(accelerator.run.prepared(model).parameters)
    kept = sum(r.current.numel() if r.weights is None else r.weights.stop - r.weights.start for r in records)
    return accelerator.get_state_dict(model), kept, sum(record.current.numel() for record in records)


def test_weights_under_adapters_are_sharded_and_checkpoints_are_those_of_zero1(tmp_path: Path) -> None:
    found = run_ranks(_fully_sharded, 2, str(tmp_path / "checkpoint"), True)
    assert sum(kept for _, kept, _ in found) == found[0][2]
    assert all(kept < 0.51 * total for _, kept, total in found)
    weights, kept, total = run_ranks(_fully_sharded, 2, str(tmp_path / "checkpoint"), False)[0]
    assert kept == total
    assert weights
    for name, value in weights.items():
        torch.testing.assert_close(found[0][0][name], value, rtol=1e-5, atol=1e-7, msg=name)


def test_vocabulary_of_gpt2_on_two_ranks(tmp_path: Path) -> None:
    """50257 entries are not divisible by two."""
    build = functools.partial(gpt2, vocab=50257, tied=False)
    options = {"r": 2, "target_modules": ["wte", "lm_head"]}
    reference = alone(build(), options, batches(50257, 2))
    results = run_ranks(
        on_rank, 2, build, [LoraPlugin(**options), tp(2)], batches(50257, 2), str(tmp_path), timeout=110
    )
    assert_alike(reference, results, tmp_path)


def test_what_peft_saved_goes_on_sharded(tmp_path: Path) -> None:
    """peft trains and saves, other ranks go on from the folder, and so does peft: both arrive at the same."""
    first, second = tmp_path / "first", tmp_path / "second"
    alone(gpt2(), RICH, batches(count=2))["model"].save_pretrained(first)
    reference = alone(gpt2(), {}, batches()[2:], adapter=str(first))
    plugins = [LoraPlugin(adapter=str(first)), tp(2)]
    results = run_ranks(on_rank, 4, gpt2, plugins, batches()[2:], str(second), timeout=110)
    assert_alike(reference, results, second)


def test_dropout_drops_what_one_process_drops(tmp_path: Path) -> None:
    """Ranks that have the same inputs drop the same: with all targets column-parallel that is what peft drops."""
    options = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj", "lm_head"], "lora_dropout": 0.3}
    reference = alone(llama(), options, batches())
    plugins = [LoraPlugin(**options), tp(2)]
    results = run_ranks(on_rank, 2, llama, plugins, batches(), str(tmp_path), timeout=110)
    assert_alike(reference, results, tmp_path)


def _from_given_weights(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a model that was built with other weights and takes those of ``folder``, and of one that was not."""
    accelerator = NeuronAccelerator(
        plugins=[
            LoraPlugin(r=2, target_modules=["q_proj"]),
            ModelParallelismPlugin(tensor_parallel_size=2, checkpoint_dir=folder),
        ]
    )
    torch.manual_seed(3)
    model = llama()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    ids = batches()[0]["input_ids"]
    with torch.no_grad():
        return accelerator.prepare(model).eval()(input_ids=ids).logits, llama().eval()(input_ids=ids).logits


def test_weights_of_the_base_model_may_lack_adapters(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    for found, expected in run_ranks(_from_given_weights, 2, str(tmp_path)):
        assert torch.allclose(found, expected, atol=1e-5)


def _save_state(folder: str, adapter: str) -> None:
    accelerator = NeuronAccelerator(plugins=[LoraPlugin(peft_config=RICH), tp(2), Zero1Plugin()])
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.backward(model(**batches()[0]).loss)
    optimizer.step()
    accelerator.save_state(folder)
    save_adapter(accelerator, model, adapter)


def test_a_consolidated_checkpoint_holds_the_adapter(tmp_path: Path) -> None:
    """What is extracted is what was saved, byte for byte; base weights are there for transformers to load."""
    saved, whole, adapter = tmp_path / "saved", tmp_path / "whole", tmp_path / "adapter"
    run_ranks(_save_state, 2, str(saved), str(tmp_path / "expected"))
    command = [sys.executable, "-m", "neuron_accel.cli.main", "consolidate", str(saved), str(whole)]
    subprocess.run(command, check=True)
    extract_adapter(whole, gpt2(), LoraPlugin(peft_config=RICH), adapter)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (adapter / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    with pytest.raises(CheckpointError, match="lacks"):
        extract_adapter(whole, gpt2(), LoraPlugin(r=2, target_modules=["lm_head"]), adapter)


def _from_yaml(path: str, folder: str) -> list[str]:
    accelerator = NeuronAccelerator(config=path)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    save_adapter(accelerator, model, folder)
    return [plugin.spec.name for plugin in accelerator.plan.plugins]


def test_a_configuration_names_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "plugins:\n  - lora: {r: 3, target_modules: [q_proj, v_proj], lora_alpha: 6}\n"
        "  - model_parallelism: {tensor_parallel_size: 2}\n  - zero1\n"
    )
    names = run_ranks(_from_yaml, 2, str(path), str(tmp_path / "adapter"))[0]
    assert names.index("lora") < names.index("model_parallelism") < names.index("lora_layers") < names.index("zero1")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tuple(w.shape) for n, w in weights.items() if "lora_A" in n} == {(3, 32)}


def _lazily(data: list, base: str, folder: str) -> list[float]:
    from transformers import AutoModelForCausalLM

    from neuron_accel import lazy_load_for_parallelism

    accelerator = NeuronAccelerator(plugins=[LoraPlugin(**LLAMA), ModelParallelismPlugin(tensor_parallel_size=2)])
    with lazy_load_for_parallelism():
        model = AutoModelForCausalLM.from_pretrained(base)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    torch.manual_seed(7)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6))
    losses = []
    for batch in data:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    save_adapter(accelerator, model, folder)
    return losses


def test_weights_that_each_rank_reads_by_itself(tmp_path: Path) -> None:
    """A model that is loaded without memory has adapters with peft's values."""
    data = batches()
    model = llama()
    model.save_pretrained(tmp_path / "base")
    reference = alone(model, LLAMA, data)
    for losses in run_ranks(_lazily, 2, data, str(tmp_path / "base"), str(tmp_path / "adapter")):
        assert losses == pytest.approx(reference["losses"], rel=1e-5)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(close(reference["weights"][name], value) for name, value in weights.items())
