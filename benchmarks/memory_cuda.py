"""Predicted against measured memory of a step on a GPU: the peak that ``plan`` counts without one, and the peak of what
torch's allocator hands out there.

    python -m benchmarks.memory_cuda --json found.json
    python -m benchmarks.memory_cuda --measured found.json      the table again, without a GPU: predicted anew

Models are built from their configurations, in bfloat16, and trained by AdamW with clipping on sequences of 1024 tokens.
Two ranks share one GPU if there is no second one, and copy what they send through host memory; what a rank allocates
does not depend on that. Measured is ``torch.cuda.max_memory_allocated()`` in the second step, of the rank that
allocates most. "Requested" is the same without the rounding of the allocator: it hands out up to 1 MiB more than it is
asked for. "Reserved" is what the allocator has taken from the GPU, with free memory in pieces.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from neuron_accel.testing import RanksError, run_ranks

SEQUENCE = 1024
ROWS = 2
"""Samples of a data-parallel rank."""
LAYOUTS: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "one process": (1, []),
    "ZeRO-1 x 2": (2, [{"zero1": {}}]),
    "tensor parallel x 2": (2, [{"tensor_parallel": {"tensor_parallel_size": 2}}]),
    "fully sharded x 2": (2, [{"fully_sharded": {}}]),
}
"""Number of ranks, and plugins."""
BLOCKS, FUSED = "FlashAttentionPlugin", "sdpa"
ATTENTION = ("eager", BLOCKS, FUSED)
"""For "sdpa" torch has a kernel on a GPU that keeps what FlashAttentionPlugin keeps, which is what is predicted."""


@dataclass(frozen=True)
class Case:
    """A model in a layout."""

    model: str
    layout: str
    attention: str
    recompute: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}, {self.attention}{', recomputation' * self.recompute}"

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def plugins(self) -> list[dict[str, Any]]:
        more = {"activation_checkpointing": self.recompute, "flash_attention": self.attention == BLOCKS}
        return LAYOUTS[self.layout][1] + [{name: {}} for name, is_on in more.items() if is_on]

    @property
    def batch(self) -> int:
        """Samples in a step, over all ranks."""
        return ROWS * (1 if self.layout.startswith("tensor") else self.ranks)


@dataclass(frozen=True)
class Measured:
    """Bytes at the peak of a step."""

    allocated: int
    requested: int
    reserved: int
    left: int
    """Allocated before the model was built: nothing, or what a former case has left behind."""


def models(small: bool) -> dict[str, Any]:
    """Configurations by name."""
    from neuron_accel_plan.models import known_models
    from transformers import AutoConfig, GPT2Config

    found = {
        "Qwen3 0.6B": AutoConfig.for_model(**known_models()["qwen3-0.6b"]),
        "Llama 3.2 1B": AutoConfig.for_model(**known_models()["llama-3.2-1b"]),
        "GPT-2 774M": GPT2Config(n_layer=36, n_embd=1280, n_head=20),
    }
    for config in found.values():
        config.use_cache = False
        if small:
            config.num_hidden_layers, config.vocab_size, config.bos_token_id, config.eos_token_id = 4, 512, 1, 2
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:4]
    return found


def cases(small: bool) -> Iterator[Case]:
    for model in models(small):
        for layout, (ranks, _) in LAYOUTS.items():
            for attention in ATTENTION if ranks == 1 else ATTENTION[:1]:
                for recompute in (False, True):
                    yield Case(model, layout, attention, recompute)


def predict(case: Case, small: bool) -> Any:
    """What ``plan`` counts of it."""
    from neuron_accel_plan import plan

    return plan(
        models(small)[case.model],
        world_size=case.ranks,
        global_batch=case.batch,
        sequence=SEQUENCE,
        foreach=True,
        config={"plugins": (replace(case, attention=BLOCKS) if case.attention == FUSED else case).plugins},
    )


def build(case: Case, small: bool) -> tuple[Any, Any]:
    """Builds the model on this rank.

    Returns:
        its step, which is that of a dry run, and the accelerator.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from neuron_accel import NeuronAccelerator

    config = models(small)[case.model]
    config._attn_implementation = FUSED if case.attention == FUSED else "eager"
    torch.manual_seed(0)
    accelerator = NeuronAccelerator(config={"plugins": case.plugins, "backend": "torch"})
    with accelerator.device:
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        ids = torch.randint(0, config.vocab_size, (ROWS, SEQUENCE))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))

    def step() -> None:
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, accelerator


def measure(cases: Sequence[Case], small: bool) -> list[Measured]:
    """Called on every rank."""
    import torch

    found = []
    for case in cases:
        left = clean()
        step, accelerator = build(case, small)
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        statistics = torch.cuda.memory_stats()
        peaks = [statistics[f"{kind}_bytes.all.peak"] for kind in ("allocated", "requested", "reserved")]
        found.append(Measured(*peaks, left=left))
        accelerator.free_memory()
        del step, accelerator
    return found


def clean() -> int:
    """Frees what is not in use, the workspaces of cuBLAS too; returns the bytes that are left."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def measure_all(wanted: Sequence[Case], small: bool) -> Iterator[tuple[Case, Measured]]:
    """Those of a model on as many ranks follow each other in the same ranks."""
    for ranks, model in sorted({(case.ranks, case.model) for case in wanted}):
        alike = [case for case in wanted if (case.model, case.ranks) == (model, ranks)]
        harness.note(f"measuring {model} on {ranks} ranks")
        try:
            by_rank = run_ranks(measure, ranks, alike, small, backend="cuda", timeout=300)
        except RanksError as error:  # the others are worth having
            print(error, flush=True)
            continue
        for case, each in zip(alike, zip(*by_rank, strict=True), strict=True):
            yield case, max(each, key=lambda measured: measured.allocated)


def table(predicted: dict[Case, int], measured: dict[Case, Measured]) -> str:
    rows = [["model, layout, attention", "predicted, GiB", "allocated, GiB", "/ predicted", "requested", "reserved"]]
    for case, found in measured.items():
        sizes = [f"{size / 2**30:.2f}" for size in (predicted[case], found.allocated, found.requested, found.reserved)]
        rows.append([str(case), *sizes[:2], f"{found.allocated / predicted[case]:.3f}", *sizes[2:]])
    return harness.in_table(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="what --json wrote, in place of measuring")
    parser.add_argument("--no-prediction", action="store_true", help="measure only")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    wanted = [case for case in cases(options.small) if options.only in str(case)]
    if options.measured:
        read = {Case(**each["case"]): Measured(**each["measured"]) for each in json.loads(options.measured.read_text())}
        measured = {case: read[case] for case in wanted if case in read}
    else:
        import torch

        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
        measured = {}
        for case, each in measure_all(wanted, options.small):
            measured[case] = each
            if options.json:
                plain = [{"case": asdict(case), "measured": asdict(each)} for case, each in measured.items()]
                options.json.write_text(json.dumps(plain, indent=1), encoding="utf-8")
    if options.no_prediction:
        return
    predicted = {}
    for case in measured:
        harness.note(f"dry run: {case}")
        predicted[case] = predict(case, options.small).step.peak.total
    harness.note("")
    print(table(predicted, measured))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
