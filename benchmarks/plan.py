"""Predicted against measured step time of ten layouts of a small Llama on two ranks of this machine.

Usage: ``python -m benchmarks.plan [--calibration FILE] [--small]``. The machine is calibrated first, on kernels and
collectives and not on the cases (or a calibration of it is given); then every layout is predicted by a dry run in
this process; then all are measured in the same gloo ranks, taking turns. Printed are the errors, their median, and
whether the three layouts that were fastest are in the predicted order. Aims: a median within 15 %, and the right order.

Each rank has a core, as on Trainium; the prediction does not know of ranks that share one.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuron_accel_plan import plan
from neuron_accel_plan.calibration import load_calibration
from neuron_accel_plan.time import StepTime

from benchmarks import harness
from neuron_accel.testing import run_ranks

RANKS = 2
TP: dict[str, Any] = {"tensor_parallel": {"tensor_parallel_size": 2}}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "dp2": [],
    "dp2, ZeRO-1": [{"zero1": {}}],
    "dp2, recomputation": [{"activation_checkpointing": {}}],
    "dp2, fully sharded": [{"fully_sharded": {}}],
    "dp2, fully sharded, recomputation": [{"fully_sharded": {}}, {"activation_checkpointing": {}}],
    "tp2": [TP],
    "tp2, sp": [TP, {"sequence_parallel": {"regather": False}}],
    "tp2, recomputation": [TP, {"activation_checkpointing": {}}],
    "tp2, sp, recomputation": [TP, {"sequence_parallel": {"regather": False}}, {"activation_checkpointing": {}}],
    "pp2": [{"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 4}}],
}
GLOBAL_BATCH = 8


def model_config(small: bool) -> Any:
    from transformers import LlamaConfig

    hidden = 64 if small else 256
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2 if small else 4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=512 if small else 2048,
        max_position_embeddings=512,
        attn_implementation="eager",
        use_cache=False,
    )


def sequence(small: bool) -> int:
    return 32 if small else 256


# ---- predicted -------------------------------------------------------------------------------------------------------
def predict(small: bool, calibration: Path) -> dict[str, StepTime]:
    """The step time of every layout."""
    machine, found = load_calibration(calibration), {}
    for name, plugins in LAYOUTS.items():
        harness.note(f"dry run: {name}")
        counted = plan(
            model_config(small),
            world_size=RANKS,
            global_batch=GLOBAL_BATCH,
            sequence=sequence(small),
            config={"plugins": plugins},
            dtype="float32",
            full_depth=True,
        )
        found[name] = counted.predict(machine)
    harness.note("")
    return found


def calibrate(file: Path) -> None:
    """Measures the machine with as many ranks as the layouts have."""
    from neuron_accel.cli.main import main as command

    if command(["calibrate", "--nproc-per-node", str(RANKS), "--cpu", "--output", str(file)]):
        raise SystemExit("the machine cannot be calibrated")


# ---- measured --------------------------------------------------------------------------------------------------------
def build(configuration: dict[str, Any], small: bool) -> Callable[[], Any]:
    """Builds a layout on this rank and returns its step, of all its micro-batches, which is that of a dry run."""
    import torch
    from transformers import LlamaForCausalLM

    from neuron_accel import NeuronAccelerator

    torch.manual_seed(0)
    accelerator = NeuronAccelerator(config={**configuration, "backend": "torch"})
    model = LlamaForCausalLM(model_config(small))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    calls = accelerator.gradient_accumulation_steps
    rows = GLOBAL_BATCH // accelerator.data_parallel_size // calls
    ids = torch.randint(0, model_config(small).vocab_size, (rows, sequence(small)))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def step() -> None:
        for _ in range(calls):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return step


def configurations() -> dict[str, dict[str, Any]]:
    """Those of the layouts, by their names."""
    return {name: {"plugins": plugins} for name, plugins in LAYOUTS.items()}


def measure(configurations: dict[str, dict[str, Any]], small: bool, repeat: int) -> dict[str, list[float]]:
    """Seconds of a step of every layout in every round; called on every rank. Layouts take turns, in an order that
    changes from round to round, so that what else the machine does hits all alike."""
    import random

    import torch.distributed as dist

    steps = {name: build(configuration, small) for name, configuration in configurations.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    order, names = random.Random(0), list(steps)
    for _ in range(repeat):
        order.shuffle(names)
        for name in names:
            seconds[name].append(harness.timed_steps(steps[name], dist.barrier, warm_up=1, steps=1))
    return seconds


# ---- side by side ----------------------------------------------------------------------------------------------------
def report(predicted: dict[str, StepTime], measured: dict[str, float]) -> list[str]:
    """The table and what follows from it."""
    rows = [["layout", "measured, ms", "predicted, ms", "interval", "error", "in it"]]
    errors = []
    for name, seconds in sorted(measured.items(), key=lambda item: item[1]):
        found = predicted[name]
        error = found.seconds / seconds - 1
        errors.append(abs(error))
        rows.append(
            [
                name,
                f"{1e3 * seconds:.1f}",
                f"{1e3 * found.seconds:.1f}",
                f"{1e3 * found.low:.0f}-{1e3 * found.high:.0f}",
                f"{error:+.0%}",
                "yes" if found.low <= seconds <= found.high else "no",
            ]
        )
    fastest = sorted(measured, key=measured.__getitem__)[:3]
    expected = sorted(predicted, key=lambda name: predicted[name].seconds)[:3]
    verdict = "in the predicted order" if fastest == expected else f"predicted: {'; '.join(expected)}"
    return [
        harness.in_table(rows),
        "",
        f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}",
        f"fastest three: {'; '.join(fastest)} ({verdict})",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.set_defaults(ranks=[RANKS])
    parser.add_argument("--calibration", type=Path, help="of this machine with two ranks (default: measured now)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the parts of each prediction")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = options.calibration or Path(folder, "machine.yaml")
        if options.calibration is None:
            calibrate(file)
        predicted = predict(options.small, file)
    harness.note(f"measuring {len(LAYOUTS)} layouts, {options.repeat} rounds")
    rounds = run_ranks(measure, RANKS, configurations(), options.small, options.repeat, timeout=1800)[0]
    harness.note("")
    measured = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    print("\n".join(report(predicted, measured)))
    print(f"{time.monotonic() - begin:.0f} s")
    if options.json:
        found = {
            name: {"measured": rounds[name], "predicted": each.seconds, "parts": dict(each.parts)}
            for name, each in predicted.items()
        }
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
