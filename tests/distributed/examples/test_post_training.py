"""The example with TRL's trainers, tiny, for each method. That sharded training equals stock: `trainer/test_trl.py`."""

from __future__ import annotations

import json
import math

import pytest

from neuron_accel.testing import run_ranks
from tests.distributed.examples.test_examples import EXAMPLES, run_script

SCRIPT = EXAMPLES / "post_training" / "train.py"
STRATEGIES = {
    "sft": ["--tensor_parallel_size=2"],
    "dpo": ["--zero_1"],
    "kto": ["--zero_1"],
    "reward": ["--fully_sharded"],
    "grpo": ["--zero_1"],
    "rloo": ["--fully_sharded"],
}


@pytest.mark.parametrize("method", STRATEGIES)
def test_a_method_trains(method, tmp_path):
    pytest.importorskip("trl")
    given = [f"--output_dir={tmp_path}", "--max_steps=2", "--logging_steps=1", "--report_to=none", "--use_cpu"]
    given += ["--per_device_train_batch_size=2", "--bf16=False", *STRATEGIES[method]]
    given += ["--num_generations=2", "--max_completion_length=4"] if method in ("grpo", "rloo") else []
    run_ranks(run_script, 2, str(SCRIPT), ["--method", method, *given], timeout=100)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert (tmp_path / "model.safetensors").is_file()
