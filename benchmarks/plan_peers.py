"""`neuron-accel plan` beside other tools that predict the memory and time of a training: calculon, llm-analysis, and
torch's MemTracker, on the same layouts of Llama models with the same constants of the hardware.

    pip install --no-deps llm-analysis==0.2.2 && pip install 'fire<0.6'
    git clone https://github.com/calculon-ai/calculon
    python -m benchmarks.plan_peers --calculon calculon [--calibration FILE] [--json FILE]

calculon is the one by NVIDIA's researchers, which is not on the package index: the package of that name there is
something else. llm-analysis asks for old releases of transformers, with which it only reads configurations from the
hub. A tool that is not there has n/a in its columns.

All layouts train in bfloat16 with AdamW under ZeRO-1, which keeps fp32 master weights, since that is what all of these
tools can describe; attention is eager and there is no dropout. Each tool gets its own options for it:

* plan: the plugins; models of 7 B parameters and more are extrapolated from two and three blocks.
* MemTracker: counts a dry run of the same layout at full depth. What is left of the unsharded model is subtracted, as
  it is in the memory of the host. Its module hooks are removed, since logits that are sharded over ranks refuse them,
  so that it counts totals.
* calculon: ``tensor_par_comm_type`` is rs_ag with sequence parallelism and ar without, ``activation_recompute`` full or
  none, ``optimizer_sharding`` for ZeRO-1, ``processing_mode`` roofline, and ``data_par_overlap`` without recomputation
  only: with it, it subtracts all time of the memory from the time in which messages are hidden, and a step of 7 B
  parameters waits 1.5 s for messages that take 0.04 s. It knows no gated feed-forward layer: its two matrices get 3/2
  of the size, which has the same weights and operations.
* llm-analysis: ``sp_size``, ``ActivationRecomputation.FULL`` or NONE, ``DSZeRO.STAGE_1``, bfloat16 gradients
  (``master_weights_dtype_bytes=2``; it keeps 12 bytes of state per parameter then as well), ``flash_attn=False``, and
  3/2 of the feed-forward size, too.

Rates of the core, its memory and the network are those that ``plan`` takes for trn1.32xlarge: published peaks, and the
shares of them that it assumes. So the times differ by what the tools count, not by the machine. The layouts of the
small model on four ranks are also measured, on gloo ranks of this machine: memory as what malloc has handed out at each
operation of a step, beyond what it had before, in ranks that ran the same layout once already. With ``--calibration``
(of this machine with four ranks, see ``neuron-accel calibrate``) their time is measured, and predicted with it.
"""

from __future__ import annotations

import gc
import json
import logging
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from neuron_accel_plan import plan
from neuron_accel_plan.calibration import Machine, load_calibration, machine_of
from neuron_accel_plan.time import collective_seconds, predict_time
from neuron_accel_plan.trace import ELEMENTWISE, PRODUCT, Message

from benchmarks import harness
from neuron_accel import DryRun, find_instance
from neuron_accel.testing import run_ranks
from neuron_accel.testing.resources import allocated_bytes

INSTANCE = "trn1.32xlarge"
DTYPE = "bfloat16"
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 2048,
}
LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
LLAMA_13B = LLAMA_7B | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}
LLAMA_70B = LLAMA_7B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout of a model. Ranks that tensor parallelism leaves over are data-parallel, under ZeRO-1.

    Args:
        name: of the model.
        model: fields of its LlamaConfig.
        ranks: number of ranks.
        samples: samples of a data-parallel rank in a step.
        sequence: tokens in a sample.
        tensor_parallel: degree.
        sequence_parallel, recompute: whether activations are sharded along the sequence, and recomputed.
        measured: whether it is small enough to be run on this machine.
    """

    name: str
    model: Mapping[str, int]
    ranks: int
    samples: int = 1
    sequence: int = 4096
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    measured: bool = False

    @property
    def replicas(self) -> int:
        return self.ranks // self.tensor_parallel

    def __str__(self) -> str:
        parts = [f"tp{self.tensor_parallel}"] if self.tensor_parallel > 1 else []
        parts += [f"dp{self.replicas}"]
        parts += ["sp"] if self.sequence_parallel else []
        parts += ["recompute"] if self.recompute else []
        return f"{self.name}: {', '.join(parts)}"

    def plugins(self) -> list[dict[str, Any]]:
        """The strategies, as in a configuration."""
        found: list[dict[str, Any]] = []
        if self.tensor_parallel > 1:
            found.append({"tensor_parallel": {"tensor_parallel_size": self.tensor_parallel}})
        if self.sequence_parallel:
            found.append({"sequence_parallel": {"regather": False}})
        if self.recompute:
            found.append({"activation_checkpointing": {}})
        return [*found, {"zero1": {}}]

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            **self.model, max_position_embeddings=self.sequence, attn_implementation="eager", use_cache=False
        )


def _small(**layout: Any) -> Case:
    return Case(name="7 M", model=SMALL, ranks=4, sequence=256, measured=True, **layout)


CASES = (
    _small(samples=2),
    _small(samples=2, recompute=True),
    _small(samples=4, tensor_parallel=2),
    _small(samples=4, tensor_parallel=2, sequence_parallel=True),
    _small(samples=4, tensor_parallel=2, sequence_parallel=True, recompute=True),
    Case(name="7 B", model=LLAMA_7B, ranks=32, recompute=True),
    Case(name="7 B", model=LLAMA_7B, ranks=32, tensor_parallel=8),
    Case(name="7 B", model=LLAMA_7B, ranks=32, tensor_parallel=8, sequence_parallel=True),
    Case(name="7 B", model=LLAMA_7B, ranks=32, tensor_parallel=8, sequence_parallel=True, recompute=True),
    Case(name="13 B", model=LLAMA_13B, ranks=64, tensor_parallel=8, sequence_parallel=True, recompute=True),
    Case(name="70 B", model=LLAMA_70B, ranks=512, tensor_parallel=8, sequence_parallel=True),
    Case(name="70 B", model=LLAMA_70B, ranks=512, tensor_parallel=8, sequence_parallel=True, recompute=True),
)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a tool says of a layout.

    Args:
        memory: peak of a rank, in bytes; None if it does not know.
        seconds: of a step; None if it does not know.
        interval: bounds of ``seconds``.
        parts: bytes by what the tool says they are for.
    """

    memory: float | None = None
    seconds: float | None = None
    interval: tuple[float, float] | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class Missing(Exception):
    """A tool is not installed; the text says how to install it."""


# ---- The same constants for all --------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Constants:
    """Achieved rates of a core and of its groups, for tools that take one number for each.

    Args:
        products: operations per second of matrix products.
        memory: bytes per second.
        links: by degree of parallelism, bytes per second that a rank of the group sends, and seconds of a message.
        overlap: share of a collective's time in which the core can compute.
    """

    products: float
    memory: float
    links: Mapping[str, tuple[float, float]]
    overlap: float


def constants(case: Case, machine: Machine) -> Constants:
    """Returns the constants that a prediction of ``case`` uses, at the sizes of its largest kernels and messages. What
    was measured alone is slower in a training step by the mean factor of both passes."""
    tokens, hidden = case.samples * case.sequence, case.model["hidden_size"]
    operations = 2 * tokens * hidden * case.model["intermediate_size"] / case.tensor_parallel
    links = {}
    tensor, data = range(case.tensor_parallel), range(0, case.ranks, case.tensor_parallel)
    for axis, ranks, sent in (("tp", tensor, 2 * tokens * hidden), ("dp", data, 1 << 24)):
        if len(ranks) > 1:
            full, empty = (
                collective_seconds(machine, Message("all_gather", axis, tuple(ranks), size, DTYPE))
                for size in (sent, 1)
            )
            links[axis] = (sent / max(full - empty, 1e-9), empty)
    slower = statistics.mean(
        machine.in_training[phase].at() if phase in machine.in_training else 1.0 for phase in ("forward", "backward")
    )
    return Constants(
        products=_rate(machine, PRODUCT, operations) / slower,
        memory=_rate(machine, ELEMENTWISE, 2 * tokens * hidden) / slower,
        links=links,
        overlap=min(1.0, machine.overlap.at()),
    )


def _rate(machine: Machine, kind: str, size: float) -> float:
    by_dtype = machine.kernels[kind]
    return (by_dtype.get(DTYPE) or by_dtype[""]).at(size)


# ---- Tools -----------------------------------------------------------------------------------------------------------
def ours(case: Case, machine: Machine | None) -> Estimate:
    """`neuron-accel plan`."""
    counted = plan(
        case.config(),
        world_size=case.ranks,
        global_batch=case.samples * case.replicas,
        sequence=case.sequence,
        config={"plugins": case.plugins()},
        dtype=DTYPE,
        full_depth=case.measured,
    )
    peak = counted.step.peak
    if machine is None:
        return Estimate(memory=peak.total, parts=peak.parts)
    found = predict_time(counted.step, machine)
    return Estimate(memory=peak.total, parts=peak.parts, seconds=found.seconds, interval=(found.low, found.high))


def mem_tracker(case: Case, machine: Machine | None) -> Estimate:
    """torch's MemTracker, on a dry run."""
    from torch.distributed._tools.mem_tracker import MemTracker

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": case.plugins()}, backend=DryRun(world_size=case.ranks))
    tracker = MemTracker()
    with tracker:
        tracker._mod_tracker.__exit__()  # its hooks on modules, see the docstring of this file
        step, unsharded = build(case, accelerator, "meta")
        step()
    gc.collect()
    with tracker:  # looks for the peak anew
        tracker._mod_tracker.__exit__()
        step()
    (peak,) = [
        parts["Total"] for device, parts in tracker.get_tracker_snapshot("peak").items() if device.type == "meta"
    ]
    on_host = unsharded()
    del step
    accelerator.end_training()
    return Estimate(memory=peak - on_host)


def calculon(checkout: Path, case: Case, machine: Machine | None) -> Estimate:
    """calculon: one network for the ranks of a tensor-parallel group, and one for those that are data-parallel."""
    if not (checkout / "calculon/llm/llm.py").is_file():
        raise Missing(f"there is no calculon in {checkout}: git clone https://github.com/calculon-ai/calculon")
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    from calculon.llm.llm import Llm
    from calculon.system import System

    used = constants(case, machine or machine_of(find_instance(INSTANCE)))
    gib = 1 << 20  # more than any layout needs, so that none is refused

    def network(axis: str) -> dict[str, Any]:
        bandwidth, latency = used.links.get(axis, (1e9, 0.0))
        ring = {"reduce_scatter": [1.0, -1], "all_gather": [1.0, -1], "all_reduce": [2.0, -1]}
        return {
            "bandwidth": bandwidth / 1e9,
            "efficiency": 1.0,
            "size": case.ranks,
            "latency": latency,
            "ops": {"p2p": [1.0, None], **ring},
            "must_be_filled": False,
            "processor_usage": min(1 - used.overlap, 0.99),
        }

    core = {DTYPE: {"tflops": used.products / 1e12, "gflops_efficiency": [[0, 1.0]]}}
    memory = {"GiB": gib, "GBps": used.memory / 1e9, "MB_efficiency": [[0, 1.0]]}
    system = System(
        {
            "matrix": core,
            "vector": core,  # element-wise operations are bound by memory, as in the other tools
            "mem1": memory,
            "mem2": memory,
            "processing_mode": "roofline",
            "networks": [network("tp"), network("dp")],
        }
    )
    heads, hidden = case.model["num_attention_heads"], case.model["hidden_size"]
    application = Llm.Application(
        {
            "hidden": hidden,
            "feedforward": case.model["intermediate_size"] * 3 // 2,
            "seq_size": case.sequence,
            "attn_heads": heads,
            "attn_size": hidden // heads,
            "num_blocks": case.model["num_hidden_layers"],
        }
    )
    execution = Llm.Execution.from_json(
        {
            "num_procs": case.ranks,
            "tensor_par": case.tensor_parallel,
            "pipeline_par": 1,
            "data_par": case.replicas,
            "tensor_par_net": 0,
            "pipeline_par_net": 1,
            "data_par_net": 1,
            "batch_size": case.samples * case.replicas,
            "microbatch_size": case.samples,
            "datatype": DTYPE,
            "fused_activation": False,
            "attention_type": "multihead",
            "activation_recompute": "full" if case.recompute else "none",
            "pipeline_interleaving": 1,
            "optimizer_sharding": True,
            "tensor_par_comm_type": "rs_ag" if case.sequence_parallel else "ar",
            "tensor_par_overlap": "none",
            "seq_par_ag_redo": False,
            "data_par_overlap": not case.recompute,
            "weight_offload": False,
            "activations_offload": False,
            "optimizer_offload": False,
            "training": True,
        }
    )
    model = Llm(application, logging.getLogger("calculon"))
    model.compile(system, execution)
    model.run(system)
    return Estimate(
        memory=model.get_mem_tier1_cap_req(),
        seconds=None if machine is None else model.get_total_time(),
        parts={
            "weights": model.get_weight_space(),
            "gradients": model.get_weight_grad_space(),
            "optimizer": model.get_optimizer_space(),
            "activations": model.get_act_space() + model.get_act_checkpoint_size(),
            "gradients of activations": model.get_act_grad_space(),
        },
    )


def llm_analysis(case: Case, machine: Machine | None) -> Estimate:
    """llm-analysis."""
    try:
        from llm_analysis import analysis
        from llm_analysis.config import DtypeConfig, GPUConfig, ModelConfig, ParallelismConfig
    except ImportError as error:
        raise Missing("pip install --no-deps llm-analysis==0.2.2 && pip install 'fire<0.6'") from error
    logging.getLogger("llm_analysis").setLevel(logging.ERROR)
    analysis.logger.setLevel(logging.ERROR)
    used = constants(case, machine or machine_of(find_instance(INSTANCE)))
    hidden, feed_forward = case.model["hidden_size"], case.model["intermediate_size"] * 3 // 2
    fastest = {"tp": (1e9, 0.0), "dp": (1e9, 0.0)} | dict(used.links)
    tool = analysis.LLMAnalysis(
        ModelConfig(
            name=case.name,
            num_layers=case.model["num_hidden_layers"],
            n_head=case.model["num_attention_heads"],
            hidden_dim=hidden,
            vocab_size=case.model["vocab_size"],
            max_seq_len=case.sequence,
            num_key_value_heads=case.model["num_key_value_heads"],
            ffn_embed_dim=feed_forward,
            expansion_ratio=feed_forward / hidden,
        ),
        GPUConfig(
            name=INSTANCE,
            mem_per_GPU_in_GB=1 << 20,
            hbm_bandwidth_in_GB_per_sec=used.memory / 1e9,
            intra_node_bandwidth_in_GB_per_sec=fastest["tp"][0] / 1e9,
            intra_node_min_message_latency=fastest["tp"][1],
            peak_fp16_TFLOPS=used.products / 1e12,
            inter_node_bandwidth_in_GB_per_sec=fastest["dp"][0] / 1e9,
        ),
        DtypeConfig(name=DTYPE, weight_bits=16, activation_bits=16, embedding_bits=16),
        ParallelismConfig(
            tp_size=case.tensor_parallel,
            dp_size=case.replicas,
            sp_size=case.tensor_parallel if case.sequence_parallel else 1,
        ),
        flops_efficiency=1.0,
        hbm_memory_efficiency=1.0,
    )
    kinds = analysis.ActivationRecomputation
    found = tool.training(
        batch_size_per_gpu=case.samples,
        gradient_accumulation_steps=1,
        global_batch_size=case.samples * case.replicas,
        seq_len=case.sequence,
        activation_recomputation=kinds.FULL if case.recompute else kinds.NONE,
        ds_zero=analysis.DSZeRO.STAGE_1,
        layernorm_dtype_bytes=4,
        master_weights_dtype_bytes=2,
        flash_attn=False,
    )
    parts = {"weights": "weight", "gradients": "gradient", "optimizer": "optimizer_state", "activations": "activation"}
    return Estimate(
        memory=found["(weight+op_state+grad+act)_memory_per_gpu"],
        seconds=None if machine is None else found["latency_per_iter"],
        parts={part: found[f"{name}_memory_per_gpu"] for part, name in parts.items()},
    )


# ---- Measured --------------------------------------------------------------------------------------------------------
def build(case: Case, accelerator: Any, device: str = "cpu") -> tuple[Callable[[], None], Callable[[], int]]:
    """Builds a layout on this rank, with a model on ``device``: "meta" for a dry run.

    Returns:
        its step, and what is left of the unsharded model, in bytes: optimizers may hold its parameters, on the host.
    """
    import torch
    from transformers import LlamaForCausalLM

    with torch.device(device):
        model = LlamaForCausalLM(case.config()).to(torch.bfloat16)
    original = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.zeros(case.samples, case.sequence, dtype=torch.int64, device=accelerator.device)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def unsharded() -> int:
        kept = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        alive = [storage for reference in original if (storage := reference()) is not None]
        return sum(storage.nbytes() for storage in alive if storage._cdata not in kept)

    return step, unsharded


def measure_all(cases: Iterable[Case], repeat: int) -> list[tuple[int, float]]:
    """The peak of memory in a step of each case, in bytes, and its time; called on every rank."""
    return [measure(case, repeat) for case in cases]


def measure(case: Case, repeat: int) -> tuple[int, float]:
    """The peak of memory in a step, in bytes, and its time. The first turn loads and creates what the process keeps
    from then on, so that the second is about tensors."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from neuron_accel import NeuronAccelerator

    class Watch(TorchDispatchMode):
        peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            self.peak = max(self.peak, allocated_bytes())
            return result

    peak, seconds = 0, 0.0
    for _ in range(2):
        gc.collect()
        before = allocated_bytes()
        accelerator = NeuronAccelerator(config={"plugins": case.plugins(), "backend": "torch"})
        step, unsharded = build(case, accelerator)
        step()
        seconds = statistics.median(harness.timed_steps(step, dist.barrier, warm_up=0, steps=1) for _ in range(repeat))
        gc.collect()
        with Watch() as watch:
            step()
        peak = watch.peak - before - unsharded()
        del step, unsharded, accelerator
    return peak, seconds


# ---- Side by side ----------------------------------------------------------------------------------------------------
def table(found: Mapping[str, Mapping[str, Estimate]]) -> str:
    """One row for each layout: memory, then time, by tool."""
    memory, seconds = ["measured", *_TOOLS], ["measured", "plan", "calculon", "llm-analysis"]
    rows = [["layout", *(f"{tool}, GiB" for tool in memory), *(f"{tool}, s" for tool in seconds)]]
    for layout, by_tool in found.items():
        cells = [_number(by_tool.get(tool, Estimate()).memory, 1 << 30) for tool in memory]
        for tool in seconds:
            estimate = by_tool.get(tool, Estimate())
            bounds = "" if estimate.interval is None else "-".join(_number(bound) for bound in estimate.interval)
            cells.append(_number(estimate.seconds) + f" ({bounds})" * bool(bounds))
        rows.append([layout, *cells])
    return harness.in_table(rows)


def _number(value: float | None, unit: float = 1.0) -> str:
    if value is None:
        return "n/a"
    scaled = value / unit
    return f"{scaled:.1f}" if scaled >= 10 else f"{scaled:.3g}"


_TOOLS = ("plan", "MemTracker", "calculon", "llm-analysis")
NOTES = """\
measured: layouts of the small model only; their time with --calibration, since no constants of this machine are known.
MemTracker: no time. Its peak is that of the same dry run that plan counts; the two are not independent in that.
calculon: no embedding, logits or loss; as many key/value heads as query heads; masks of dropout are always counted.
llm-analysis: time of matrix products alone, without communication and what is bound by memory, those of a feed-forward
layer of 16 hidden^2 operations per token; tied embeddings; gradients are never sharded under ZeRO-1."""


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__)
    parser.set_defaults(ranks=[4])
    parser.add_argument("--calculon", type=Path, metavar="FOLDER", help="a checkout of calculon-ai/calculon")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="of this machine with four ranks: also time of what is measured",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what each tool says, with its parts")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    cases = [case for case in CASES if case.measured or not options.small]
    here = None if options.calibration is None else load_calibration(options.calibration)
    published = machine_of(find_instance(INSTANCE))
    tools: dict[str, Callable[[Case, Machine | None], Estimate]] = {
        "plan": ours,
        "MemTracker": mem_tracker,
        "llm-analysis": llm_analysis,
    }
    if options.calculon is None:
        print("calculon: n/a, --calculon names no checkout of https://github.com/calculon-ai/calculon")
    else:
        tools["calculon"] = lambda case, machine: calculon(options.calculon.resolve(), case, machine)
    found: dict[str, dict[str, Estimate]] = {str(case): {} for case in cases}
    for name, tool in tools.items():
        try:
            for case in cases:
                harness.note(f"{name}: {case}")
                found[str(case)][name] = tool(case, here if case.measured else published)
        except Missing as missing:
            harness.note("")
            print(f"{name}: n/a, {missing}")
    measured = [case for case in cases if case.measured]
    harness.note(f"measuring {len(measured)} layouts")
    ranks = run_ranks(measure_all, 4, measured, options.repeat, timeout=1800)
    harness.note("")
    for case, by_rank in zip(measured, zip(*ranks, strict=True), strict=True):
        peak, seconds = max(peak for peak, _ in by_rank), by_rank[0][1]
        found[str(case)]["measured"] = Estimate(memory=peak, seconds=None if here is None else seconds)
    print(f"{table(found)}\n\n{NOTES}")
    print(f"{time.monotonic() - begin:.0f} s")
    if options.json:
        plain = {layout: {tool: asdict(each) for tool, each in by.items()} for layout, by in found.items()}
        options.json.write_text(json.dumps(plain, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
