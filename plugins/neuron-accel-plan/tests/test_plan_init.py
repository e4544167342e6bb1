"""``neuron-accel init``: what it writes trains, and every question has a default and an option."""

from __future__ import annotations

import runpy
import shlex
import sys

import pytest
import yaml

from neuron_accel.commands import format_seconds, main
from neuron_accel.testing import run_ranks

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
FOUND = {
    "configuration": {"gradient_accumulation_steps": 2, "plugins": ["zero1"]},
    "layout": "zero1, accumulation 2",
    "model": "LlamaForCausalLM",
    "parameters": 5,
    "mesh": "dp 2",
    "rows": 1,
    "seconds": [1.0, 0.5, 2.0],
    "memory": 1 << 20,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    from transformers import LlamaConfig

    monkeypatch.chdir(tmp_path)
    LlamaConfig(num_hidden_layers=2, vocab_size=300, max_position_embeddings=64, **SIZE).save_pretrained("tiny")
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n" * 40)
    return tmp_path


@pytest.fixture
def found(monkeypatch):
    """The search is replaced, and what it is asked is kept."""
    from neuron_accel_plan import auto_search

    asked = []
    monkeypatch.setattr(auto_search, "answer", lambda question: asked.append(question) or FOUND)
    return asked


def train(script):
    sys.argv = [script]
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    return ended.value.code


@pytest.mark.timeout(300)
def test_what_is_written_trains_on_two_ranks_and_resumes(folder, found, capfd):
    words = "--model tiny --data text.txt --instance cpu --global-batch 4 --sequence 16 --steps 4 --output out --yes"
    assert main(["init", *words.split()]) == 0
    said = capfd.readouterr().out
    assert "zero1, accumulation 2, on dp 2: 1 s a step are predicted (500 ms to 2 s)" in " ".join(said.split())
    line = shlex.split(said.splitlines()[-1])
    assert line == ["neuron-accel", "launch", "--cpu", "--nproc-per-node", "2", "out/train.py"]
    assert main([*line[1:-1], "--dry-run", line[-1]]) == 0
    assert yaml.safe_load((folder / "out/train.yaml").read_text()) == FOUND["configuration"]
    assert found[0]["ranks"] == 2
    assert (found[0]["global_batch"], found[0]["sequence"], found[0]["dtype"]) == (4, 16, "float32")

    capfd.readouterr()
    assert run_ranks(train, 2, "out/train.py") == [0, 0]
    printed = capfd.readouterr()
    assert "step 4: loss" in printed.out + printed.err
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained("out/out/model").config.vocab_size == 300
    assert run_ranks(train, 1, "out/train.py") == [0]  # there is no step left
    printed = capfd.readouterr()
    assert "resumed from" in printed.out + printed.err
    assert "step 4: loss" not in printed.out + printed.err


def test_questions_have_defaults_and_wrong_answers_are_asked_again(folder, found, capsys, monkeypatch):
    questions = []
    answers = iter(["tiny", "", "trn1.23xlarge", "trn1.32xlarge", "2", "", "zero", "32", ""])

    def answer(question):
        questions.append(question)
        return next(answers)

    monkeypatch.setattr("builtins.input", answer)
    assert main(["init", "--output", "out"]) == 0
    assert [question.partition(" [")[0] for question in questions] == [
        *("model, a name or a folder", "text to train on, a file or a folder"),
        *("instance type, or cpu", "instance type, or cpu", "number of instances"),
        *("samples in a step, over all ranks", "tokens in a sample", "tokens in a sample", "optimizer steps"),
    ]
    assert questions[5].endswith("[256]: ")
    assert questions[6].endswith("[64]: ")  # the model has no more positions
    said = capsys.readouterr()
    assert "'trn1.23xlarge' is not a known Trainium instance" in said.err
    assert "'zero' is not a number" in said.err
    assert "there is no data yet" in said.out
    last = said.out.splitlines()[-1]
    assert "--instance trn1.32xlarge --nproc-per-node 32 --nnodes 2 --node-rank R" in last
    asked = found[0]
    assert (asked["ranks"], asked["instance"], asked["lnc"], asked["dtype"]) == (64, "trn1.32xlarge", 1, "bfloat16")


def test_files_are_not_replaced_unasked(folder, found, capsys):
    words = ["init", "--model", "tiny", "--instance", "cpu", "--yes"]
    assert main(words) == 0
    (folder / "train.py").write_text("mine")
    assert main(words) == 2
    assert "train.py" in capsys.readouterr().err
    assert (folder / "train.py").read_text() == "mine"
    assert main([*words, "--overwrite"]) == 0
    assert (folder / "train.py").read_text() != "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--instance trn1.32xlarge --nproc-per-node 3", "--nproc-per-node has no effect with --instance trn1.32xlarge"),
        ("--instance cpu --instances 2", "--instances has no effect with --instance cpu"),
        ("--instance cpu --steps 0", "'0' is not a number of at least 1"),
        ("--model no-such-model", "There is no model no-such-model"),
    ],
)
def test_wrong_options_are_refused(words, message, folder, found, capsys):
    given = words if "--model" in words else f"--model tiny {words}"
    assert main(["init", *given.split(), "--yes"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not found


@pytest.mark.timeout(300)
def test_the_layout_is_that_of_a_search(folder, monkeypatch, capsys):
    """Nothing is replaced but the list of plugins, of which a search tries few here."""
    from neuron_accel_plan import candidates, plan
    from neuron_accel_plan.ranks import cpu_machine
    from transformers import LlamaConfig

    from neuron_accel import TensorParallelPlugin, Zero1Plugin

    monkeypatch.setattr(candidates, "offering", lambda: [TensorParallelPlugin, Zero1Plugin])
    LlamaConfig(num_hidden_layers=4, vocab_size=300, max_position_embeddings=64, **SIZE).save_pretrained("four")
    words = "--model four --data text.txt --instance cpu --global-batch 4 --sequence 16 --output out --jobs 1 --yes"
    assert main(["init", *words.split()]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = {}
    for layout in (
        {"plugins": []},
        {"plugins": ["zero1"]},
        {"plugins": [{"tensor_parallel": {"tensor_parallel_size": 2}}]},
    ):
        for accumulation in (1, 2):
            config = {**layout, "gradient_accumulation_steps": accumulation}
            counted = plan("four", world_size=2, global_batch=4, sequence=16, config=config, dtype="float32")
            found[str(config)] = counted.predict(cpu_machine()).seconds
    written = plan("four", world_size=2, global_batch=4, sequence=16, config="out/train.yaml", dtype="float32")
    seconds = written.predict(cpu_machine()).seconds
    assert seconds == pytest.approx(min(found.values()))
    assert f"on {written.mesh}: {format_seconds(seconds)} a step are predicted" in said
