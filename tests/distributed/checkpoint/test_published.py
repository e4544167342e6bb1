"""What is saved for other programs is what transformers' own ``save_pretrained`` of the same model writes."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from neuron_accel.cli.main import main
from neuron_accel.testing import run_ranks
from tests.object_store import make_bucket, register

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
STACKED = "model.layers.0.mlp.experts.gate_up_proj"


def build(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "head_dim": 8}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    experts = {"num_local_experts" if family == "gpt_oss" else "num_experts": 4}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **counts, **experts))


def save_all(folder, families):
    """Saves each model in every way; returns whether weights that were overwritten can be loaded from each."""
    from neuron_accel import NeuronAccelerator

    loaded = {}
    for family in families:
        accelerator = NeuronAccelerator(config={"plugins": [TP2, "zero1"]})
        model = build(family)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        accelerator.save_state(f"{folder}/{family}/state")
        accelerator.save_model(model, f"{folder}/{family}/model")
        accelerator.save_model(model, f"{folder}/{family}/pickled", safe_serialization=False)
        expected = accelerator.get_state_dict(model)
        for form in ("state", "model", "pickled"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            accelerator.load_state(f"{folder}/{family}/{form}")
            found = accelerator.get_state_dict(model)
            loaded[family, form] = all(torch.equal(found[name], value) for name, value in expected.items())
        accelerator.end_training()
    return loaded


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    families = ["qwen3_moe", "gpt_oss"]
    loaded = run_ranks(save_all, 2, str(folder), families)
    for family in families:
        build(family).save_pretrained(folder / family / "stock")
        assert main(["consolidate", "-q", f"{folder}/{family}/state", f"{folder}/{family}/consolidated"]) == 0
    return folder, loaded


@pytest.mark.parametrize("form", ["model", "consolidated"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_folder_is_that_of_save_pretrained(family, form, saved):
    stock, ours = saved[0] / family / "stock", saved[0] / family / form
    expected, found = (load_file(folder / "model.safetensors") for folder in (stock, ours))
    assert found.keys() == expected.keys()
    assert (STACKED in expected) == (family == "gpt_oss")  # the published form of one has a weight for each expert
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    for name in ("config.json", "generation_config.json"):
        assert json.loads((ours / name).read_text()) == json.loads((stock / name).read_text()), name


def test_every_form_is_loaded_again(saved):
    for loaded in saved[1]:
        assert len(loaded) == 6
        assert all(loaded.values()), loaded


def load_from(url):
    from neuron_accel import NeuronAccelerator
    from neuron_accel.errors import CheckpointError

    register()
    accelerator = NeuronAccelerator()
    model = build("qwen3_moe")
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    accelerator.save_model(model, url)
    with pytest.raises(CheckpointError, match="other names") as raised:
        accelerator.load_state(url)
    return str(raised.value)


def test_a_published_mixture_in_object_storage_is_refused(tmp_path):
    _, url = make_bucket(tmp_path)
    assert "copy the folder to a disk" in run_ranks(load_from, 1, f"{url}/model")[0]


def test_weights_that_transformers_cannot_convert_keep_their_names(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    assert main(["consolidate", f"{saved[0]}/qwen3_moe/state", str(tmp_path / "model")]) == 0
    assert "weights keep the names that they have in memory" in capsys.readouterr().out
    assert STACKED in load_file(tmp_path / "model" / "model.safetensors")


def test_what_transformers_does_not_know_keeps_its_names(saved):
    """The weights of a checkpoint that names no class, or has adapters."""
    folder, _ = saved
    config = folder / "qwen3_moe" / "state" / "config.json"
    assert json.loads(config.read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
    from neuron_accel.checkpoint.format.published import published
    from neuron_accel.checkpoint.format.source import SourceTensor
    from neuron_accel.engine.sharding.layout import Layout

    tensors = [SourceTensor(name=STACKED, layout=Layout(shape=(4, 16, 16), dtype="float32"))]
    assert [t.name for t in published(tensors, b'{"model_type": "qwen3_moe"}')] == [STACKED]
    others = [*tensors, SourceTensor(name="model.adapter", layout=Layout(shape=(4,), dtype="float32"))]
    assert published(others, config.read_bytes()) == others
    assert len(published(tensors, config.read_bytes())) == 8  # gate and up of four experts
