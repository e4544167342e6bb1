"""Charts of the numbers that are beside this file, and the programs that count and measure these."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from docs.figures.drawing import (
    AXES,
    BLUE,
    GREEN,
    GREY,
    LINE,
    ORANGE,
    PALE,
    PAPER,
    PURPLE,
    RED,
    TEAL,
    Picture,
)

FOLDER = Path(__file__).parent
GIB = 2**30


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def write(name: str, numbers: Any) -> None:
    (FOLDER / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")


# ---- Memory of a rank ------------------------------------------------------------------------------------------------
PARTS = {
    "weights": BLUE,
    "gradients": ORANGE,
    "master weights": PURPLE,
    "optimizer state": GREEN,
    "saved activations": TEAL,
    "buckets": RED,
    "temporary": GREY,
}


def strategies() -> dict[str, list[Any]]:
    """What is compared, by name."""
    from neuron_accel import (
        ActivationCheckpointingPlugin,
        FullyShardedPlugin,
        PipelineParallelPlugin,
        SequenceParallelPlugin,
        TensorParallelPlugin,
        Zero1Plugin,
    )

    recompute = ActivationCheckpointingPlugin()
    parallel = [TensorParallelPlugin(tensor_parallel_size=8), SequenceParallelPlugin()]
    return {
        "data parallel": [],
        "ZeRO-1": [Zero1Plugin()],
        "ZeRO-1, recomputation": [Zero1Plugin(), recompute],
        "fully sharded, recomputation": [FullyShardedPlugin(), recompute],
        "tensor 8, ZeRO-1, recomputation": [*parallel, Zero1Plugin(), recompute],
        "tensor 8, 4 stages, ZeRO-1, recomputation": [
            *parallel,
            PipelineParallelPlugin(pipeline_parallel_size=4, num_microbatches=8),
            Zero1Plugin(),
            recompute,
        ],
    }


def llama() -> Any:
    """The sizes of Llama 3 8B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )


RANKS, SAMPLES, TOKENS = 32, 32, 2048


def count_memory() -> dict[str, dict[str, int]]:
    """Bytes of the rank that keeps the most at the peak of a step, by strategy and part."""
    from neuron_accel import plan

    found = {}
    for name, plugins in strategies().items():
        counted = plan(llama(), world_size=RANKS, global_batch=SAMPLES, sequence=TOKENS, plugins=plugins)
        found[name] = dict(counted.step.peak.parts)
    return found


def memory() -> Picture:
    found = read("memory")
    left, row, scale_to = 262, 34, max(sum(parts.values()) for parts in found.values()) / GIB
    scale = 520 / scale_to
    height = 78 + row * len(found) + 86
    picture = Picture(880, height, "Memory of a rank by strategy, counted by dry runs")
    picture.text(24, 32, "Memory of a rank at the peak of a step, in GiB", size=16, bold=True)
    picture.text(
        24,
        54,
        f"Llama 3 8B in bfloat16 with AdamW on {RANKS} ranks, {SAMPLES} samples of {TOKENS:,} tokens in a step",
        colour=GREY,
    )
    bottom = 74 + row * len(found)
    for tick in range(0, int(scale_to) + 1, 20):
        x = left + tick * scale
        picture.path(f"M{x:g} 70 V{bottom}", "#e1e6ec", weight=1)
        picture.text(x, bottom + 16, str(tick), size=11, colour=GREY, anchor="middle")
    for number, (name, parts) in enumerate(found.items()):
        y, x = 76 + number * row, float(left)
        picture.text(left - 10, y + 17, name, anchor="end", size=12)
        for part, colour in PARTS.items():
            width = parts[part] / GIB * scale
            if width >= 0.5:
                picture.box(round(x, 1), y, round(width, 1), 24, fill=colour, line=PAPER, r=0, weight=0.6)
            x += width
        picture.text(x + 7, y + 17, f"{sum(parts.values()) / GIB:.1f}", size=12, bold=True)
    x, y = 24, bottom + 46
    for part, colour in PARTS.items():
        picture.box(x, y - 11, 13, 13, fill=colour, line=colour, r=2)
        picture.text(x + 19, y, part, size=12)
        x += 40 + 6.6 * len(part)
    return picture


# ---- A step over time ------------------------------------------------------------------------------------------------
def predict_step() -> dict[str, Any]:
    """What a rank does when, in seconds, with all blocks: computation by phase, collectives by axis."""
    from transformers import LlamaConfig

    from neuron_accel import SequenceParallelPlugin, TensorParallelPlugin, Zero1Plugin, plan

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    layout = [TensorParallelPlugin(tensor_parallel_size=8), SequenceParallelPlugin(), Zero1Plugin()]
    counted = plan(
        config, world_size=32, global_batch=8, sequence=2048, plugins=layout, instance="trn1.32xlarge", full_depth=True
    )
    time = counted.predict()
    spans: list[list[Any]] = []
    for span in time.spans:
        before = next((known for known in reversed(spans) if known[0] == span.lane), None)
        if before is not None and before[1] == span.label and span.start - before[3] < time.seconds * 1e-4:
            before[3] = span.end
        else:
            spans.append([span.lane, span.label, span.start, span.end])
    rounded = [[lane, label, round(start, 7), round(end, 7)] for lane, label, start, end in spans]
    return {"seconds": time.seconds, "spans": rounded}


def timeline() -> Picture:
    found = read("timeline")
    seconds, left, wide = found["seconds"], 130, 790
    picture = Picture(946, 256, "The timeline of one step of one rank, predicted")
    picture.text(24, 32, "One step of one rank, predicted", size=16, bold=True)
    layout = "tensor and sequence parallel 8, ZeRO-1 over 4"
    picture.text(24, 54, f"4 blocks of Llama, 2,048 wide, on 32 cores of trn1.32xlarge: {layout}", colour=GREY)
    phases = {"forward": BLUE, "backward": PURPLE, "clipping": RED, "optimizer step": TEAL}
    lanes = {"compute": 78, "tp": 118, "dp": 158}
    for name, y in (("computes", 78), ("sends over tp", 118), ("sends over dp", 158)):
        picture.text(left - 10, y + 19, name, anchor="end")
        picture.box(left, y, wide, 28, fill=PALE, line=PALE, r=0)
    for lane, label, start, end in found["spans"]:
        axes = ("compute",) if lane == "compute" else label.split(" ", 1)[1].split(" x ")
        for axis in axes:
            colour = phases[label] if lane == "compute" else AXES[axis]
            x, width = left + start / seconds * wide, max((end - start) / seconds * wide, 0.6)
            picture.box(round(x, 1), lanes[axis], round(width, 1), 28, fill=colour, line=colour, r=0, weight=0)
    for tick in range(0, int(seconds * 1000) + 1, 10):
        x = left + tick / seconds / 1000 * wide
        picture.path(f"M{x:g} 74 V192", LINE, weight=0.7, dashed=True)
        picture.text(x, 208, f"{tick} ms", size=11, colour=GREY, anchor="middle")
    x = left
    for part, colour in {**phases, "collectives over tp": AXES["tp"], "over dp": AXES["dp"]}.items():
        picture.box(x, 225, 13, 13, fill=colour, line=colour, r=2)
        picture.text(x + 19, 236, part, size=12)
        x += 44 + 6.6 * len(part)
    return picture


# ---- Loss of sharded runs over that of one process -------------------------------------------------------------------
STEPS = 120


def compositions() -> dict[str, tuple[int, list[Any]]]:
    """Number of ranks and plugins of each run, by name; the first is the reference."""
    from neuron_accel import FullyShardedPlugin, ModelParallelismPlugin, SequenceParallelPlugin, Zero1Plugin

    return {
        "one process": (1, []),
        "ZeRO-1 over 4": (4, [Zero1Plugin()]),
        "fully sharded over 4": (4, [FullyShardedPlugin()]),
        "tensor and sequence 2, ZeRO-1 over 2": (
            4,
            [ModelParallelismPlugin(tensor_parallel_size=2), SequenceParallelPlugin(), Zero1Plugin()],
        ),
        "tensor 2, 2 stages": (
            4,
            [ModelParallelismPlugin(tensor_parallel_size=2, pipeline_parallel_size=2, num_microbatches=4)],
        ),
    }


def train(name: str, steps: int) -> list[float]:
    """Runs on each rank: trains a small Llama in fp32 on the bytes of the licence. Returns the loss of each step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=compositions()[name][1])
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, attn_implementation="eager", **sizes))
    text = torch.tensor(list((FOLDER.parents[1] / "LICENSE").read_bytes()))
    starts = torch.randint(len(text) - 64, (STEPS * 8,))[: steps * 8]
    rows = [{"input_ids": text[start : start + 64], "labels": text[start : start + 64]} for start in starts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = torch.utils.data.DataLoader(rows, batch_size=8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
    return losses


def measure_losses(steps: int = STEPS) -> dict[str, list[float]]:
    """The loss of each step, by composition, on CPU ranks of this machine."""
    from neuron_accel.testing import run_ranks

    return {name: run_ranks(train, ranks, name, steps, timeout=300)[0] for name, (ranks, _) in compositions().items()}


def loss() -> Picture:
    found = read("loss")
    (alone, reference), *others = found.items()
    steps, left, wide, colours = len(reference), 76, 560, (ORANGE, TEAL, GREEN, PURPLE)
    picture = Picture(990, 420, "Losses of sharded runs over that of one process, and their difference")
    picture.text(24, 32, "Sharding does not change the loss", size=16, bold=True)
    picture.text(
        24, 54, f"a small Llama in fp32, {steps} steps of AdamW on four CPU ranks and in one process", colour=GREY
    )

    def at(step: int) -> float:
        return round(left + step / (steps - 1) * wide, 1)

    top, high, most = 74, 170, max(reference)
    for tick in range(int(most) + 1):
        y = top + high - tick / most * high
        picture.path(f"M{left} {y:.1f} H{left + wide}", "#e1e6ec", weight=1)
        picture.text(left - 8, y + 4, str(tick), size=11, colour=GREY, anchor="end")
    picture.text(left + wide, top + 10, "loss", bold=True, size=12, anchor="end")

    def curve(values: Sequence[float], place: Callable[[float], float]) -> str:
        return "M" + " L".join(f"{at(step):g} {place(value):.1f}" for step, value in enumerate(values))

    def place(value: float) -> float:
        return top + high - value / most * high

    # The widest line first, so that those that lie below each other are all seen.
    picture.path(curve(reference, place), "#c3ccd6", weight=8)
    for number, ((_, values), colour) in enumerate(zip(others, colours, strict=True)):
        picture.path(curve(values, place), colour, weight=4.4 - 1.1 * number)
    low_top, low_high, decades = 266, 112, (-8, -5)
    for exponent in range(decades[0], decades[1] + 1):
        y = low_top + low_high * (decades[1] - exponent) / (decades[1] - decades[0])
        picture.path(f"M{left} {y:.1f} H{left + wide}", "#e1e6ec", weight=1)
        picture.text(left - 8, y + 4, f"1e{exponent}", size=11, colour=GREY, anchor="end")

    def low(value: float) -> float:
        exponent = math.log10(value) if value > 10 ** decades[0] else decades[0]
        return low_top + low_high * (decades[1] - exponent) / (decades[1] - decades[0])

    for (_, values), colour in zip(others, colours, strict=True):
        apart = [abs(a - b) / b for a, b in zip(values, reference, strict=True)]
        picture.path(curve(list(itertools.accumulate(apart, max)), low), colour, weight=2)
    picture.text(left + 8, low_top + 14, "largest relative difference so far", bold=True, size=12)
    for step in range(0, steps + 1, 20):
        picture.text(
            at(min(step, steps - 1)), low_top + low_high + 18, str(step), size=11, colour=GREY, anchor="middle"
        )
    picture.text(left + wide / 2, 412, "step", size=12, colour=GREY, anchor="middle")
    picture.path("M666 96 H696", "#c3ccd6", weight=9)
    picture.text(706, 100, alone)
    for number, ((name, values), colour) in enumerate(zip(others, colours, strict=True)):
        y = 124 + number * 46
        worst = max(abs(a - b) / b for a, b in zip(values, reference, strict=True))
        picture.path(f"M666 {y - 4} H696", colour, weight=4)
        picture.text(706, y, name)
        picture.text(706, y + 17, f"at most {worst:.0e} from it", colour=GREY, size=12)
    return picture
