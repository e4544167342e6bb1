"""Counting a training as it is written: which step, where it stops, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from neuron_accel_plan.script import count_training
from torch import nn

from neuron_accel.commands import main
from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import PlanError, UsageError


def training(steps=4, plugins=(), ended=None, batch=None, **options):
    """A function that trains two linear layers, with a step for each batch."""

    def train():
        from neuron_accel import NeuronAccelerator

        accelerator = NeuronAccelerator(plugins=plugins, **options)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        try:
            for index in range(steps):
                inputs = torch.ones(batch or 2 + index, 8, device=accelerator.device)
                accelerator.backward(model(inputs).sum())
                optimizer.step()
                optimizer.zero_grad()
        except Exception:
            ended.append("caught")
        finally:
            if ended is not None:
                ended.append(index)

    return train


def test_the_step_is_the_one_that_is_asked_for_and_the_last_that_runs():
    found = {}
    for step in (1, 2, 3):
        ended: list[int] = []
        found[step] = count_training(training(ended=ended), world_size=4, step=step)
        assert ended == [step - 1]
    # forward, and backward without the gradient of the inputs, of as many rows as the step has
    assert {step: count.layout.step.operations for step, count in found.items()} == {
        step: 2 * (step + 1) * (2 * 8 * 16 + 3 * 16 * 4) for step in (1, 2, 3)
    }
    assert [found[step].layout.micro_batch for step in (1, 2, 3)] == [2, 3, 4]
    state = [found[step].layout.step.peak.parts["optimizer state"] for step in (1, 2)]
    parameters = 8 * 16 + 16 + 16 * 4 + 4
    assert state[1] == 2 * 4 * parameters
    assert found[2].layout.parameters == parameters
    (flow,) = found[2].layout.step.flows
    assert (flow.op, flow.axis, flow.ranks, flow.sent) == ("all_reduce", "dp", 4, 2 * 3 * 4 * parameters // 4)


@pytest.mark.parametrize(
    ("names", "ranks", "rank"), [(("pp", "tp", "sp", "zero1"), 4, 3), (("tp", "stage 3", "recompute"), 4, 0)]
)
def test_every_strategy_counts_as_for_a_model(names, ranks, rank):
    from neuron_accel_plan.layout import accelerate_set_aside
    from plan_support import count, plugins_of
    from transformers import LlamaConfig, LlamaForCausalLM

    from neuron_accel import DryRun

    def train():
        from neuron_accel import NeuronAccelerator

        accelerator = NeuronAccelerator(plugins=plugins_of(names), gradient_accumulation_steps=2)
        size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, vocab_size=256, attn_implementation="eager", **size))
        loader = torch.utils.data.DataLoader(torch.ones(64, 64, dtype=torch.int64), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        for ids in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    found = count_training(train, world_size=ranks, rank=rank).layout
    with accelerate_set_aside():
        peak, parts, flows, operations, weights = count(names, DryRun(world_size=ranks, rank=rank))
    assert (found.step.flows, found.step.operations, found.step.weights) == (flows, operations, weights)
    assert found.step.peak.total == pytest.approx(peak, rel=0.002)
    for part, most in parts.items():
        assert max(each.parts[part] for each in found.step.peaks) == pytest.approx(most, rel=0.03)
    assert found.bubble == (pytest.approx(1 / 3) if "pp" in names else 0)
    assert (found.micro_batch, found.accumulation) == ((1, 4) if "pp" in names else (2, 2))


def test_a_second_optimizer_that_steps_less_is_part_of_the_step():
    def train():
        from neuron_accel import NeuronAccelerator

        accelerator = NeuronAccelerator()
        models = [nn.Linear(8, 8), nn.Linear(8, 8)]
        prepared = accelerator.prepare(*models, *(torch.optim.SGD(model.parameters(), lr=0.1) for model in models))
        inputs = torch.ones(1, 8, device=accelerator.device)
        for index in range(3):
            for model, optimizer in zip(prepared[:2], prepared[2:], strict=True):
                if model is prepared[0] or index:
                    accelerator.backward(model(inputs).sum())
                    optimizer.step()
                    optimizer.zero_grad()

    first, second, third = (count_training(train, world_size=2, step=step).layout.step for step in (1, 2, 3))
    assert [count.operations for count in (first, second, third)] == [2 * 2 * 64, 2 * 2 * 64, 4 * 2 * 64]


def test_values_are_zeros_and_their_places_are_kept():
    values = []

    def train():
        from neuron_accel import NeuronAccelerator

        accelerator = NeuronAccelerator()
        model = nn.Linear(8, 8)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            output = model(torch.ones(1, 8, device=accelerator.device))
            accelerator.backward(output.sum())
            output = output.detach()
            host = torch.ones(1, 8)
            values.append([output.sum().item(), float(output.sum()), bool(output.isnan().any()), output.tolist()])
            values.append([output.cpu().numpy().sum(), host.copy_(output).sum().item()])
            optimizer.step()

    found = count_training(train, world_size=2)
    assert values == [[0.0, 0.0, False, [[0.0] * 8]], [0.0, 0.0]] * 2
    assert sorted(found.reads.values()) == [4, 8]
    assert all(place.rpartition(":")[0] == __file__ for place in found.reads)


def test_a_trainer_is_counted(tmp_path):
    def train():
        from transformers import LlamaConfig, LlamaForCausalLM

        from neuron_accel import NeuronTrainer, NeuronTrainingArguments

        size = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=32, **size))
        args = NeuronTrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_steps=1,
            tensor_parallel_size=2,
            zero_1=True,
            max_steps=3,
            report_to=[],
        )
        row = {name: torch.ones(8, dtype=torch.int64) for name in ("input_ids", "labels")}
        NeuronTrainer(model=model, args=args, train_dataset=[row] * 32).train(resume_from_checkpoint=True)

    layout = count_training(train, world_size=4).layout
    assert (layout.mesh, layout.accumulation, layout.micro_batch, layout.sequence) == ("dp 2 x tp 2", 2, 2, 8)
    assert {"tp", "dp"} <= {flow.axis for flow in layout.step.flows}
    assert layout.step.peak.parts["optimizer state"] > 0
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True, kw_only=True)
class LooksAtValues(StrategyPlugin):
    spec: ClassVar[PluginSpec] = PluginSpec(
        name="looks", api_version=4, phase=Phase.OPTIMIZER, provides=frozenset({"looks-at-values"})
    )


def test_what_looks_at_values_is_left_out_and_nothing_is_saved_or_loaded(tmp_path):
    def train():
        from neuron_accel import NeuronAccelerator

        accelerator = NeuronAccelerator(plugins=[LooksAtValues()])
        model = nn.Linear(8, 8)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        assert not accelerator.load_state(resume="latest")
        for _ in range(3):
            loss = model(torch.ones(1, 8, device=accelerator.device)).sum()
            accelerator.backward(loss)
            optimizer.step()
            accelerator.log({"loss": loss})
            accelerator.save_state(tmp_path / "state")
            accelerator.save_model(model, tmp_path / "model")
            accelerator.save(model.state_dict(), tmp_path / "weights.pt")

    found = count_training(train, world_size=4)
    assert (found.step, found.layout.plugins) == (2, ("data_parallel",))
    assert not list(tmp_path.iterdir())


def test_other_accelerators_are_not_disturbed():
    from accelerate.state import AcceleratorState, PartialState

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(cpu=True)
    before = dict(PartialState._shared_state)
    count_training(training(), world_size=8, rank=3, instance="trn1.32xlarge")
    assert dict(PartialState._shared_state) == before
    assert NeuronAccelerator(cpu=True).device.type == accelerator.device.type == "cpu"
    AcceleratorState._reset_state(True)


def failing():
    training(steps=1)()
    raise ValueError("no such file")


@pytest.mark.parametrize(
    ("train", "options", "error", "words"),
    [
        (
            training(steps=1),
            {},
            UsageError,
            ["before optimizer step 2", "stepped once", "count step 1"],
        ),
        (lambda: None, {}, UsageError, ["prepared no model", "neuron_accel.NeuronAccelerator"]),
        (failing, {}, UsageError, ["ValueError: no such file"]),
        (lambda: exit(2), {}, UsageError, ["exits with 2", "follow --"]),
        (training(), {"step": 0}, UsageError, ["step is 0"]),
        (training(), {"world_size": 48, "instance": "trn1.32xlarge"}, PlanError, ["48 ranks"]),
    ],
)
def test_what_cannot_be_counted_is_refused_with_the_reason(train, options, error, words):
    with pytest.raises(error) as caught:
        count_training(train, **{"world_size": 4, **options})
    for word in words:
        assert word in str(caught.value)


# ---- the command -----------------------------------------------------------------------------------------------------
SCRIPT = """
import sys
import torch
from torch import nn
from neuron_accel import NeuronAccelerator

print("arguments", sys.argv[1:])
accelerator = NeuronAccelerator()
model = nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for step in range(3):
    loss = model(torch.ones(4, 8, device=accelerator.device)).sum()
    accelerator.backward(loss)
    optimizer.step()
    if "--divide" in sys.argv:
        print(1 / loss.item())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_command_prints_the_tables_and_a_page(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = tmp_path / "page.html"
    words = ["--nproc-per-node", "32", "--nnodes", "2", "--instance", "trn1.32xlarge", "--html", str(page)]
    assert main(["plan", script, *words, "--", "--epochs", "3"]) == 0
    output = capsys.readouterr()
    assert output.err == "arguments ['--epochs', '3']\n"
    for text in (
        "as rank 0 of dp 64",
        "1 of 4 samples",
        "all_reduce",
        "predicted time of a step",
        "optimizer step 2 of",
    ):
        assert text in output.out
    assert "tokens/s" not in output.out
    assert "1 of 4 samples" in page.read_text()
    assert "by published runs" in page.read_text()


def test_arguments_of_the_script_that_do_not_follow_the_dashes(script, capsys):
    with pytest.raises(SystemExit):
        main(["plan", script, "--nproc-per-node", "2", "--epochs", "3"])
    assert "unknown option --epochs (arguments of a script follow --)" in capsys.readouterr().err


def test_a_module_is_counted(script, capsys, monkeypatch):
    monkeypatch.chdir(Path(script).parent)
    assert main(["plan", "--module", "train", "--world-size", "2", "--steps", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1


def test_the_error_of_a_script_names_the_values_that_it_has_read(script, capsys):
    assert main(["plan", script, "--world-size", "4", "--", "--divide"]) == 2
    error = capsys.readouterr().err
    assert 'train.py", line 16, in <module>' in error
    assert "_rank.py" not in error
    assert "why: ZeroDivisionError: float division by zero; it got zeros for values" in error
    assert f"{script}:16" in error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere.py", "--world-size", "2"], "There is no file nowhere.py"),
        (["SCRIPT"], "--nproc-per-node"),
        (["SCRIPT", "--nproc-per-node", "2", "--world-size", "4"], "contradict"),
        (["SCRIPT", "--nproc-per-node", "2", "--zero-1"], "--zero-1 would be without effect"),
        (["SCRIPT", "--nproc-per-node", "2", "--steps", "0"], "--steps is 0"),
        (["SCRIPT", "--nproc-per-node", "2", "--rank", "2"], "no rank 2 among 2"),
        (["SCRIPT", "--nproc-per-node", "2", "--brief"], "add --instance"),
        (["SCRIPT", "--nproc-per-node", "2", "--instance", "trn2.48xlarge", "--lnc", "1"], "--lnc has no effect"),
        ([], "name a training script, or pass --model"),
        (["--model", "x", "--world-size", "2"], "--global-batch and --sequence"),
        (
            ["--model", "x", "--global-batch", "2", "--sequence", "2", "--steps", "1"],
            "--steps can be given with a script only",
        ),
        (["--world-size", "2", "--", "--epochs"], "no script to pass --epochs to"),
    ],
)
def test_what_the_command_refuses(script, words, expected, capsys):
    assert main(["plan", *(script if word == "SCRIPT" else word for word in words)]) == 2
    assert expected in capsys.readouterr().err
