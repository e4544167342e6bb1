"""The example with TRL's trainers, tiny, for each method. That sharded training equals stock: `trainer/test_trl.py`."""

from __future__ import annotations

import json
import math

import pytest
from safetensors.torch import load_file

from neuron_accel.testing import run_ranks
from tests.distributed.examples.test_examples import EXAMPLES, run_script

SCRIPT = EXAMPLES / "post_training" / "train.py"
TP2 = ["--tensor_parallel_size=2", "--disable_sequence_parallel"]  # sequence parallelism refuses adapters of down_proj
STRATEGIES = {
    "sft": ["--tensor_parallel_size=2"],
    "dpo": ["--zero_1"],
    "kto": ["--zero_1"],
    "reward": ["--fully_sharded"],
    "grpo": ["--zero_1"],
    "rloo": ["--fully_sharded"],
}


SERVER = """
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.distributed.examples.test_hand_over import Server

HERE, loaded = Path(__file__).parent, []


def load_weights(weights):
    server = Server()
    server.load_weights(weights)
    loaded.append({name: torch.from_numpy(value) for name, value in server.weights.items()})
    save_file(loaded[-1], HERE / f"weights-{len(loaded)}.safetensors")


def generate(prompts, max_tokens):
    made = [[5 + number] * (1 + number % max_tokens) for number in range(len(prompts))]
    (HERE / f"prompts-{len(loaded)}.json").write_text(json.dumps(prompts))
    return made
"""
"""The file of a server that keeps what it is given, and generates a text of one more token for each prompt."""


def train(method, folder, *more):
    pytest.importorskip("trl")
    given = [f"--output_dir={folder}", "--max_steps=2", "--logging_steps=1", "--report_to=none", "--use_cpu"]
    given += ["--per_device_train_batch_size=2", "--bf16=False", *more]
    given += ["--num_generations=2", "--max_completion_length=4"] if method in ("grpo", "rloo") else []
    run_ranks(run_script, 2, str(SCRIPT), ["--method", method, *given], timeout=100)
    losses = json.loads((folder / "losses.json").read_text())
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("method", STRATEGIES)
def test_a_method_trains(method, tmp_path):
    train(method, tmp_path, *STRATEGIES[method])
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize(("method", "strategy"), [("dpo", TP2), ("reward", TP2), ("sft", ["--fully_sharded"])])
def test_only_adapters_train(method, strategy, tmp_path):
    pytest.importorskip("peft")
    train(method, tmp_path, "--lora_r=4", *strategy, "--learning_rate=0.01")
    saved = load_file(tmp_path / "adapter_model.safetensors")
    factors = {name: value for name, value in saved.items() if ".lora_" in name}
    assert len(factors) == 2 * 2 * 7  # two factors of each linear layer in two blocks
    assert all(value.any() for value in factors.values())  # the second factor begins as zero
    assert len(saved) - len(factors) == (method == "reward")  # its head


def test_a_server_generates(tmp_path):
    """It has the weights of each step, adapters added, and its texts are those that are trained on."""
    pytest.importorskip("peft")
    (tmp_path / "server.py").write_text(SERVER)
    more = [f"--server={tmp_path / 'server.py'}", "--save_strategy=steps", "--save_steps=2", "--learning_rate=0.01"]
    train("grpo", tmp_path, "--zero_1", "--lora_r=4", *more)
    first, second = (load_file(tmp_path / f"weights-{number}.safetensors") for number in (1, 2))
    assert first.keys() == second.keys()
    changed = {name for name, value in first.items() if not value.equal(second[name])}
    assert len(changed) == 2 * 7
    assert not any("lora" in name or "base" in name for name in first)
    assert not (tmp_path / "weights-3.safetensors").exists()
    for number in (1, 2):
        assert len(json.loads((tmp_path / f"prompts-{number}.json").read_text())) == 4  # of both ranks
    history = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    lengths = [entry["completions/mean_length"] for entry in history if "completions/mean_length" in entry]
    assert lengths == [2.5, 2.5]  # 1, 2, 3 and 4 tokens
