# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel plan``: what a layout needs, before an instance is rented."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.commands import (
    Parser,
    load_config,
    naming_options,
    run_module,
    run_script,
    show,
    terminal_width,
    wrap_words,
)
from neuron_accel.errors import ConfigurationError, NeuronAccelError
from neuron_accel_plan.models import find_model
from neuron_accel_plan.plan_text import (
    brief,
    describe,
    describe_changes,
    describe_search,
    describe_time,
    describe_verdict,
    gib,
    table,
)

if TYPE_CHECKING:
    from neuron_accel.contract import StrategyPlugin
    from neuron_accel_plan.changes import Change
    from neuron_accel_plan.layout import LayoutCount
    from neuron_accel_plan.published import Interval
    from neuron_accel_plan.script import ScriptCount
    from neuron_accel_plan.search import Search
    from neuron_accel_plan.time import StepTime
    from neuron_accel_plan.totals import Limits, Total

DESCRIPTION = """\
Count the memory of a rank by part, what it sends along each axis of the mesh, and its operations in one optimizer step.

One rank of the run is imitated in this process (a dry run): the plan, prepare, forward and backward passes and AdamW's
step are the real ones, on tensors that have shapes and no memory. No weights are read, and no other rank exists. Blocks
that are alike are run two and three at a time and extrapolated, so that a model of any depth takes seconds.

Strategies are given as options, or in the configuration that the training uses. Without any, every rank is a
data-parallel replica. Ranks that are left over by tensor parallelism are data-parallel.

With a training script instead of a model, the unchanged script is dry-run up to the end of its second optimizer step,
and that step is counted. Its arguments follow --. It runs as one rank of --nproc-per-node x --nnodes; what it prints
goes to stderr, and it really writes its files. Values that it reads (loss.item()) are zeros.

Memory is that of the tensors which are alive at the peak of a step. What the runtime, compiled graphs and collectives
take is not counted: 10% of a core are reserved for it (--reserve), which is an assumption. Of the stages of a pipeline,
the one with the most memory is shown. Autocast (mixed_precision) is refused.

With an instance or a calibration (see `neuron-accel calibrate`) the time of a step is predicted, as an interval. The
constants of instances are public; which fraction of them a training reaches is assumed. Those of a calibration are
measured.

With --instances, all layouts that the installed plugins support are searched for those with the shortest predicted
time: what does not fit is ruled out, and what is slower by a bound is not counted. That takes all cores (--jobs), and
of large models many minutes. After 50 seconds (--within) the search ends with what it has found, and says by how much
a layout that is left may be faster at most. Progress is shown on a terminal.

The exit code is 1 if an instance is named and the layout, or none, fits its cores and leaves the reserve.
"""
EXAMPLES = """\
examples:
  neuron-accel plan --model llama-3.1-8b --world-size 32 --global-batch 64 --sequence 4096 --zero-1
  neuron-accel plan --model some/folder --world-size 512 --global-batch 512 --sequence 4096 --tensor-parallel-size 8 \
--sequence-parallel --zero-1 --recompute --instance trn1.32xlarge
  neuron-accel plan --model some/folder --instances 16 --instance trn1.32xlarge --global-batch 1024 --sequence 4096 \
--write train.yaml
  neuron-accel plan train.py --nproc-per-node 32 --nnodes 16 --instance trn1.32xlarge -- --epochs 3
  neuron-accel plan --model config.json --world-size 64 --global-batch 64 --sequence 2048 --config train.yaml --json
"""
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
"""Those of PipelineParallelPlugin, whose module would import torch."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "bfloat16": "bfloat16", "float32": "float32"}
WITHIN = 50.0
"""Seconds after which a search ends, if nothing else is given."""
RECOMPUTED = ("blocks", "attention", "core_attention")
"""What ActivationCheckpointingPlugin recomputes by name."""

_OPTIONS = {
    "world_size": "--world-size",
    "global_batch": "--global-batch",
    "sequence": "--sequence",
    "accumulation": "--accumulation",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "num_microbatches": "--num-microbatches",
    "virtual_stages": "--virtual-stages",
    "schedule": "--schedule",
    "full_depth": "--full-depth",
    "instances": "--instances",
    "best": "--best",
    "jobs": "--jobs",
    "within": "--within",
    "price_per_hour": "--price-per-hour",
    "reserve": "--reserve",
    "zero1": "--zero-1",
    "model": "--model",
}
"""Arguments of functions in error messages, and the options that they correspond to."""


def add_arguments(parser: Parser) -> None:
    parser.rest, parser.rest_usage = "script_args", "[-- ARGUMENT ...]"
    parser.add_argument("script", nargs="?", help="a training script, to be counted as it is; its arguments follow --")
    what = parser.add_argument_group("what is trained, without a script")
    what.add_argument(
        "--model",
        metavar="MODEL",
        help="a known name such as llama-3.1-8b, a name in the hub's cache, or a folder with a config.json",
    )
    what.add_argument("--instances", type=int, metavar="N", help="number of instances, to search layouts on all cores")
    what.add_argument("--global-batch", type=int, metavar="N", help="samples in a step, over all ranks")
    what.add_argument("--sequence", type=int, metavar="N", help="tokens in a sample")
    what.add_argument(
        "--accumulation", type=int, metavar="N", help="micro-batches in a step (default: the fewest that fit)"
    )
    what.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        help="dtype of the weights: bf16 (default) or fp32, also bfloat16 or float32",
    )
    script = parser.add_argument_group("with a script")
    script.add_argument("--module", "-m", action="store_true", help="the script is a module name")
    script.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks on a machine, as for launch")
    script.add_argument("--nnodes", type=int, metavar="N", help="number of machines (default: 1)")
    script.add_argument("--steps", type=int, metavar="N", help="the optimizer step that is counted (default: 2)")
    how = parser.add_argument_group("layout")
    how.add_argument("--config", type=Path, metavar="FILE", help="configuration of the training, with its plugins")
    how.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks that share each layer")
    how.add_argument(
        "--sequence-parallel", action="store_true", help="shard activations between layers over these ranks"
    )
    how.add_argument("--zero-1", dest="zero1", action="store_true", help="shard master weights and optimizer state")
    how.add_argument("--pipeline-parallel-size", type=int, default=1, metavar="N", help="stages of a pipeline")
    how.add_argument("--num-microbatches", type=int, metavar="N", help="micro-batches in a batch of a pipeline")
    how.add_argument(
        "--schedule",
        choices=SCHEDULES,
        metavar="NAME",
        help=f"schedule of the pipeline: {', '.join(SCHEDULES)} (default: 1f1b)",
    )
    how.add_argument("--virtual-stages", type=int, metavar="N", help="stages on each rank, for --schedule interleaved")
    how.add_argument("--fully-sharded", action="store_true", help="shard weights, gradients and optimizer state")
    how.add_argument("--context-parallel-size", type=int, default=1, metavar="N", help="ranks that share a sequence")
    how.add_argument("--expert-parallel-size", type=int, default=1, metavar="N", help="ranks that share experts")
    how.add_argument(
        "--recompute",
        nargs="?",
        const=RECOMPUTED[0],
        choices=RECOMPUTED,
        metavar="WHAT",
        help=f"recompute in the backward pass: {', '.join(RECOMPUTED)} (default: {RECOMPUTED[0]})",
    )
    how.add_argument(
        "--chunked-loss", action="store_true", help="compute logits and loss for a chunk of tokens at a time"
    )
    how.add_argument("--flash-attention", action="store_true", help="compute attention without a full matrix of scores")
    where = parser.add_argument_group("where, and output")
    where.add_argument("--world-size", type=int, metavar="N", help="number of ranks (cores), to count one layout")
    where.add_argument("--instance", metavar="TYPE", help="instance type, such as trn1.32xlarge")
    where.add_argument(
        "--reserve",
        metavar="SIZE",
        help="memory of a core that is left for what is not counted: 1.5GiB, 5%% (default: 10%%)",
    )
    where.add_argument(
        "--calibration", type=Path, metavar="FILE", help="constants of neuron-accel calibrate, to predict time with"
    )
    where.add_argument(
        "--rank", type=int, metavar="N", help="rank to count (default: the one with the most memory; of a script, 0)"
    )
    where.add_argument("--full-depth", action="store_true", help="run every block instead of extrapolating")
    where.add_argument("--html", type=Path, metavar="FILE", help="also write a page with pictures, for a browser")
    where.add_argument("--json", action="store_true", help="print JSON: bytes, messages and operations")
    script.add_argument("--brief", action="store_true", help="print only whether a rank fits a core of the instance")
    script.add_argument("--lnc", type=int, metavar="N", help="physical cores per logical core, with --brief")
    search = parser.add_argument_group("search, with --instances")
    search.add_argument("--best", type=int, metavar="N", help="layouts to find (default: 10)")
    search.add_argument("--jobs", type=int, metavar="N", help="processes (default: all cores)")
    search.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help=f"end with what is found after so long (default: {WITHIN:g}); 0: when nothing can be faster",
    )
    search.add_argument("--write", type=Path, metavar="FILE", help="write the configuration of the fastest layout")
    where.add_argument(
        "--price-per-hour", type=float, metavar="USD", help="price of an instance; also print that of a million tokens"
    )
    where.add_argument(
        "--tokens", metavar="N", help="tokens of the training (2T, 100B); also print its hours and price"
    )
    where.add_argument("--finish-in", metavar="TIME", help="longest time for --tokens: 12h, 3d, 2w")
    where.add_argument("--budget", type=float, metavar="USD", help="highest price of --tokens")
    where.add_argument(
        "--why", action="store_true", help="also print the constants of the time, and why other layouts are not chosen"
    )


def _cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(args: argparse.Namespace) -> int:
    if args.script is not None:
        return _count_script(args)
    _check_price(args)
    limits = _limits(args)
    _check_model(args)
    if args.instances is not None:
        return _search(args, limits)
    if args.world_size is None and limits is not None and (limits.hours or limits.budget):
        return _how_many(args, limits)
    _check_search(args, "pass --instances instead of --world-size to search layouts, or leave them out")
    from neuron_accel_plan.changes import smaller
    from neuron_accel_plan.entry import count_fitting, layout_of
    from neuron_accel_plan.layout import no_collection_of_what_is_there

    if args.world_size is None:
        raise ConfigurationError(
            "The number of ranks is not given.",
            fix="pass --world-size to count one layout, --instances to search layouts, or --tokens with --finish-in or "
            "--budget to find how many instances are needed",
        )
    with naming_options(_OPTIONS), no_collection_of_what_is_there():
        planner, layout = layout_of(
            args.model,
            world_size=args.world_size,
            global_batch=args.global_batch,
            sequence=args.sequence,
            plugins=_plugins(args),
            config=args.config,
            accumulation=args.accumulation,
            instance=args.instance,
            dtype=args.dtype,
            reserve=_reserve(args),
        )
        given = layout.accumulation
        counted, layout = count_fitting(planner, layout, rank=args.rank, full_depth=args.full_depth)
        args.chosen = layout.accumulation if not given and layout.accumulation > 1 else None
        changes = [] if counted.fits in (True, None) else smaller(planner, counted, layout)
    return _report(counted, args, changes=changes)


def _report(
    counted: LayoutCount,
    args: argparse.Namespace,
    script: ScriptCount | None = None,
    changes: Sequence[Change] = (),
) -> int:
    """Prints and writes a count; returns the exit code."""
    predicted, limits = _predicted(counted, args), _limits(args)
    published = _published(counted, predicted, args)
    total = None
    if limits is not None and predicted is not None and counted.tokens:
        total = limits.total(predicted, counted.tokens, _instances(counted))
    if args.html is not None:
        _write(args, {counted.mesh: (counted, predicted)})
    if args.brief:
        show(_brief(counted, args))
    elif args.json:
        plain = None if predicted is None else predicted.to_dict() | _plain(published)
        smaller = [{"change": each.what, "memory": each.count.step.peak.total} for each in changes]
        others = {"smaller": smaller} if changes else {}
        printed = {**(script or counted).to_dict(), "time": plain, **others}
        if args.price_per_hour is not None and predicted is not None:
            printed["price_per_million_tokens"] = _price(counted, predicted, args)
        if total is not None:
            printed["training"] = total.to_dict()
        print(json.dumps(printed, indent=2))
    else:
        show(describe(counted, terminal_width()))
        if script is not None:
            show("\n".join(_remarks(script, args.script)))
        if predicted is not None:
            show("\n".join(["", *describe_time(predicted, counted.tokens, why=args.why, published=published)]))
            price = _price(counted, predicted, args)
            if price is not None:
                show(f"{price:,.4g} USD for a million tokens, an hour of an instance at {args.price_per_hour:,.2f} USD")
        if changes:
            show("\n".join(["", *describe_changes(changes)]))
        last = describe_verdict(counted, getattr(args, "chosen", None), terminal_width())
        if total is not None:
            last[-1:-1] = wrap_words(str(total), terminal_width())
            last[-1] += f"; {total.verdict()}" * bool(total.verdict())
        if last:
            show("\n".join(["", *last]))
    kept = total is None or (total.in_time and total.in_budget)
    return 0 if counted.fits in (True, None) and counted.compiles and kept else 1


# ---- a script --------------------------------------------------------------------------------------------------------
_OF_A_SCRIPT = ("module", "nproc_per_node", "nnodes", "steps", "brief", "lnc", "script_args")
_DEGREES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")
_STRATEGIES = ("sequence_parallel", "zero1", "fully_sharded", "recompute", "flash_attention", "chunked_loss")
_OF_A_MODEL = (
    *("model", "instances", "global_batch", "sequence", "accumulation", "dtype", "config", *_STRATEGIES),
    *("full_depth", "num_microbatches", "schedule", "virtual_stages"),
)


def _check_model(args: argparse.Namespace) -> None:
    """Checks that what belongs to a model is given, and nothing that belongs to a script."""
    if args.script_args:
        raise ConfigurationError(
            f"There is no script to pass {shlex.join(args.script_args)} to.", fix="name the script before --"
        )
    if args.model is None:
        raise ConfigurationError(
            "There is nothing to count.",
            fix="name a training script, or pass --model with a folder or config.json",
        )
    missing = [option for option in ("global_batch", "sequence") if getattr(args, option) is None]
    if missing:
        raise ConfigurationError(
            f"A model needs {' and '.join(map(_option, missing))}.", fix="pass samples in a step and tokens in a sample"
        )
    given = [name for name in _OF_A_SCRIPT if getattr(args, name)]
    if given:
        raise ConfigurationError(
            f"{', '.join(map(_option, given))} can be given with a script only.",
            fix="pass --world-size for the number of ranks",
        )
    from neuron_accel import find_instance

    with naming_options(_OPTIONS):  # before torch is imported, which takes seconds
        find_model(args.model)
        if args.instance is not None:
            find_instance(args.instance)
    args.dtype = DTYPES[args.dtype or "bf16"]


def _check_price(args: argparse.Namespace) -> None:
    if args.price_per_hour is None:
        return
    if not 0 < args.price_per_hour < math.inf:
        raise ConfigurationError(
            f"--price-per-hour is {args.price_per_hour:g}.", fix="pass a price above 0, in US dollars"
        )
    if args.instance is None:
        raise ConfigurationError("--price-per-hour needs an instance.", fix="add --instance, or leave it out")


def _limits(args: argparse.Namespace) -> Limits | None:
    """What is asked about a training of so many tokens."""
    from neuron_accel_plan.totals import Limits, parse_hours, parse_tokens

    needs = {"finish_in": ("tokens",), "budget": ("tokens", "price_per_hour"), "tokens": ("instance",)}
    for name, others in needs.items():
        missing = [_option(other) for other in others if getattr(args, other) is None]
        if getattr(args, name) is not None and missing:
            raise ConfigurationError(f"{_option(name)} needs {' and '.join(missing)}.", fix="add it, or leave it out")
    if args.budget is not None and not 0 < args.budget < math.inf:
        raise ConfigurationError(f"--budget is {args.budget:g}.", fix="pass US dollars, above 0")
    if args.tokens is None:
        return None
    return Limits(
        tokens=parse_tokens(args.tokens),
        hours=None if args.finish_in is None else parse_hours(args.finish_in),
        budget=args.budget,
        price_per_hour=args.price_per_hour,
    )


_OF_A_SEARCH = ("best", "jobs", "within", "write")


def _check_search(args: argparse.Namespace, fix: str) -> None:
    """Checks that no option of a search is given."""
    given = [_option(name) for name in _OF_A_SEARCH if getattr(args, name) is not None]
    if given:
        raise ConfigurationError(f"{', '.join(given)} would be without effect.", why="they belong to a search", fix=fix)


def _option(name: str) -> str:
    return _OPTIONS.get(name, f"--{name.replace('_', '-')}")


def _count_script(args: argparse.Namespace) -> int:
    from neuron_accel_plan.script import count_training

    given = [name for name in _OF_A_MODEL if getattr(args, name)]
    given += [name for name in _DEGREES if getattr(args, name) != 1]
    if given:
        raise ConfigurationError(
            f"A script is counted as it is, and {', '.join(map(_option, given))} would be without effect.",
            fix="leave them out; the model and its layout are those of the script, whose arguments follow --",
        )
    _check_price(args)
    _limits(args)
    _check_search(args, "leave them out")
    if not args.module and not os.path.isfile(args.script):
        raise ConfigurationError(f"There is no file {args.script}.", where=f"relative to {os.getcwd()}")
    ranks = (args.nproc_per_node or 1) * (args.nnodes or 1)
    if args.nproc_per_node is None and args.world_size is None:
        raise ConfigurationError("The number of ranks is not given.", fix="pass --nproc-per-node and --nnodes")
    if args.world_size not in (None, ranks) and (args.nproc_per_node or args.nnodes):
        raise ConfigurationError(
            f"--world-size {args.world_size} and {ranks} ranks on all machines contradict each other.",
            fix="leave --world-size out",
        )
    if args.instance is None and (args.brief or args.lnc is not None):
        raise ConfigurationError(
            "--brief needs an instance: it compares the peak with the memory of a core.", fix="add --instance"
        )
    if args.lnc is not None and not args.brief:
        raise ConfigurationError("--lnc has no effect without --brief.", fix="add --brief, or leave it out")
    try:
        with naming_options({"step": "--steps"}), _as_main(args.script, args.script_args):
            counted = count_training(
                lambda: (run_module if args.module else run_script)(args.script),
                world_size=args.world_size or ranks,
                rank=args.rank or 0,
                step=2 if args.steps is None else args.steps,
                instance=args.instance,
                reserve=_reserve(args),
                lnc=args.lnc,
            )
    except NeuronAccelError as error:
        _show_cause(error)
        raise
    return _report(counted.layout, args, counted)


def _reserve(args: argparse.Namespace) -> int | None:
    """The bytes of a core that are reserved, if that is given."""
    if args.reserve is None:
        return None
    found = re.fullmatch(r"([0-9.]+) *(GiB|MiB|%)?", args.reserve)
    try:
        number = float(found[1]) if found else -1.0
    except ValueError:
        number = -1.0
    if found is None or number < 0 or (found[2] is None and number):
        raise ConfigurationError(
            f"{args.reserve!r} is not a size.", where="--reserve", fix="write 1.5GiB, 800MiB, 5% or 0"
        )
    if found[2] != "%":
        return round(number * 2 ** (20 if found[2] == "MiB" else 30))
    if args.instance is None:
        raise ConfigurationError("--reserve has no effect without an instance.", fix="add --instance, or leave it out")
    from neuron_accel import find_instance

    return round(number / 100 * find_instance(args.instance).core_bytes(args.lnc))


def _price(counted: LayoutCount, predicted: StepTime, args: argparse.Namespace) -> float | None:
    """Price of a million tokens, if that of an instance is given and tokens are known."""
    if args.price_per_hour is None or not counted.tokens:
        return None
    return float(args.price_per_hour * _instances(counted) / 3600 * predicted.seconds / counted.tokens * 1e6)


def _instances(counted: LayoutCount) -> int:
    """Number of instances that the ranks of a layout need."""
    from neuron_accel import find_instance

    assert counted.instance is not None
    ranks = math.prod(degree for _, degree in counted.axes)
    return math.ceil(ranks / find_instance(counted.instance).hardware().full)


def _brief(counted: LayoutCount, args: argparse.Namespace) -> str:
    step = "the second step" if args.steps in (None, 2) else f"step {args.steps}"
    return brief(counted, f"{step} of rank {counted.rank}")


@contextlib.contextmanager
def _as_main(script: str, arguments: list[str]) -> Iterator[None]:
    """A context in which a script runs as ``__main__``, and prints to stderr."""
    main, path, words = sys.modules["__main__"], list(sys.path), sys.argv
    sys.argv = [script, *arguments]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.modules["__main__"], sys.path[:], sys.argv = main, path, words


def _show_cause(error: BaseException) -> None:
    """Prints the traceback of the script's own error, if it was one."""
    cause: BaseException | None = error
    while isinstance(cause, NeuronAccelError):
        cause = cause.__cause__
    if isinstance(cause, Exception):
        traceback.print_exception(type(cause), cause, _of_script(cause))


def _of_script(error: BaseException) -> types.TracebackType | None:
    """The traceback of an error from the first line of the script on."""
    stack = error.__traceback__
    while stack is not None and stack.tb_frame.f_globals.get("__name__") != "__main__":
        stack = stack.tb_next
    return stack or error.__traceback__


def _remarks(counted: ScriptCount, script: str) -> list[str]:
    """Notes on the count of a script."""
    lines = ["", f"counted: optimizer step {counted.step} of {script}, with all that it does since the one before"]
    if counted.layout.bubble:
        lines.append("stages of a pipeline differ: this is one of them, --rank counts others")
    if counted.reads:
        lines.append("values that it reads are zeros in a dry run; what it decides by them may differ:")
        lines += [f"  {place}: {times} times" for place, times in counted.reads.items()]
    return lines


def _write(args: argparse.Namespace, layouts: Mapping[str, tuple[LayoutCount, StepTime | None]]) -> None:
    from neuron_accel_plan.report import Entry, html_report

    page = html_report(
        [Entry(label, counted, time, _published(counted, time, args)) for label, (counted, time) in layouts.items()]
    )
    try:
        args.html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{args.html} cannot be written: {error.strerror or error}.",
            where="--html",
            fix="pass a file in an existing folder that can be written",
        ) from error


def _predicted(counted: LayoutCount, args: argparse.Namespace) -> StepTime | None:
    from neuron_accel_plan.calibration import load_calibration
    from neuron_accel_plan.time import predict_time

    calibration = None if args.calibration is None else load_calibration(args.calibration)
    machine = args.instance or calibration
    return None if machine is None else predict_time(counted.slowest, machine, calibration, bubble=counted.bubble)


def _published(counted: LayoutCount, predicted: StepTime | None, args: argparse.Namespace) -> Interval | None:
    """What published runs say of a prediction; None of one that is not of an instance's own constants."""
    from neuron_accel_plan.published import interval_of

    if predicted is None or counted.instance is None or args.calibration is not None:
        return None
    return interval_of(counted, predicted)


def _plain(published: Interval | None) -> dict[str, Any]:
    return {} if published is None else {"published_runs": published.to_dict()}


def _search(args: argparse.Namespace, limits: Limits | None) -> int:
    _check_layout(args, "--instances searches layouts")
    found = _searched(args, args.instances, 10 if args.best is None else args.best)
    first = found.best[0] if found.best else None
    published = None if first is None else _published(first.count, first.time, args)
    total = None
    if limits is not None and found.best:
        total = limits.total(found.best[0].time, found.tokens, found.instances)
    if args.write is not None and found.best:
        found.write(args.write)
    if args.html is not None and found.best:
        _write(args, {str(ranked.layout): (ranked.count, ranked.time) for ranked in found.best})
    if args.json:
        training = {} if total is None else {"training": total.to_dict()}
        plain = found.to_dict()
        for layout, ranked in zip(plain["layouts"], found.best, strict=True):
            layout["seconds"] |= _plain(_published(ranked.count, ranked.time, args))
        print(json.dumps({**plain, **training}, indent=2))
    else:
        show(describe_search(found, why=args.why, published=published))
        if args.write is not None and found.best:
            show(f"\nthe configuration of the first is written to {args.write}")
        if total is not None:
            verdict = f"; {total.verdict()}" * bool(total.verdict())
            show("\n".join(["", *wrap_words(f"the first: {total}{verdict}", terminal_width())]))
    return 0 if found.best and (total is None or (total.in_time and total.in_budget)) else 1


_MOST = 64
"""Instances up to which their number is searched."""


def _how_many(args: argparse.Namespace, limits: Limits) -> int:
    """Searches layouts on 1, 2, 4 and more instances, until the training ends in time, or costs more than the budget:
    more instances are faster, and cost more."""
    from neuron_accel import find_instance

    _check_layout(args, "--finish-in and --budget search layouts")
    from neuron_accel_plan.totals import long

    several = find_instance(args.instance).multi_node
    rows: list[list[str]] = []
    trained: list[Total] = []
    chosen: tuple[Search, Total] | None = None
    for instances in (1 << n for n in range(_MOST.bit_length() if several else 1)):
        found = _searched(args, instances, 1)
        if not found.best:
            rows.append([str(instances), "no layout fits", "", "", "", ""])
            if trained:  # too few samples for so many ranks
                break
            continue
        total = limits.total(found.best[0].time, found.tokens, instances)
        price = "" if total.price is None else f"{total.price:,.0f}"
        count = found.best[0].count
        rows.append(
            [
                str(instances),
                count.mesh,
                gib(count.step.peak.total).strip(),
                long(total.hours),
                f"{total.instance_hours:,.4g}",
                price,
            ]
        )
        trained.append(total)
        if total.in_budget and (total.in_time or limits.hours is None):
            chosen = (found, total)
        if not total.in_budget or (limits.hours is not None and total.in_time):
            break
    if args.write is not None and chosen is not None:
        chosen[0].write(args.write)
    if args.json:
        plain = None if chosen is None else {**chosen[0].to_dict(), "training": chosen[1].to_dict()}
        tried = [{"instances": total.instances, **total.to_dict()} for total in trained]
        print(json.dumps({"tried": tried, "chosen": plain}, indent=2))
        return 0 if chosen else 1
    show("\n".join(table(["instances", "mesh", "GiB", "time", "instance-hours", "USD"], rows)))
    if chosen is None:
        last = f"no number of instances up to {_MOST} is enough" if several else f"one {args.instance} is not enough"
    else:
        search, total = chosen
        last = f"{total.instances} x {args.instance} with {search.best[0].layout}: {total}; {total.verdict()}"
    show("\n".join(["", *wrap_words(last, terminal_width())]))
    if args.write is not None and chosen is not None:
        show(f"the configuration is written to {args.write}")
    return 0 if chosen else 1


def _check_layout(args: argparse.Namespace, what: str) -> None:
    """Checks that no option names a layout."""
    layout = ("world_size", "config", "accumulation", "rank", "full_depth", *_STRATEGIES)
    pipeline = ("num_microbatches", "schedule", "virtual_stages")
    given = [name for name in (*layout, *pipeline) if getattr(args, name)]
    given += [name for name in _DEGREES if getattr(args, name) != 1]
    if given:
        options = ", ".join(map(_option, given))
        raise ConfigurationError(
            f"{what}, and {options} would fix one.",
            fix="give --world-size instead to count it, or leave the others out",
        )
    if args.instance is None:
        raise ConfigurationError("A search needs an instance.", fix="add --instance, such as trn1.32xlarge")


def _searched(args: argparse.Namespace, instances: int, best: int) -> Search:
    from neuron_accel_plan.calibration import load_calibration
    from neuron_accel_plan.entry import plan

    with naming_options(_OPTIONS):
        found: Search = plan(
            args.model,
            instances=instances,
            instance=args.instance,
            global_batch=args.global_batch,
            sequence=args.sequence,
            dtype=args.dtype,
            reserve=_reserve(args),
            price_per_hour=args.price_per_hour,
            calibration=None if args.calibration is None else load_calibration(args.calibration),
            best=best,
            jobs=_cores() if args.jobs is None else args.jobs,
            within=within_of(args),
            progress=_progress,
        )
    return found


def within_of(args: argparse.Namespace) -> float | None:
    """The seconds after which a search ends; None without a limit."""
    return WITHIN if args.within is None else args.within or None


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K" if done == total else f"\r\033[Kdry runs: {done} of at least {total}")
        sys.stderr.flush()


def _plugins(args: argparse.Namespace) -> list[StrategyPlugin]:
    from neuron_accel import (
        ActivationCheckpointingPlugin,
        ChunkedLossPlugin,
        FlashAttentionPlugin,
        FullyShardedPlugin,
        PipelineParallelPlugin,
        SequenceParallelPlugin,
        TensorParallelPlugin,
        Zero1Plugin,
    )

    for name in _DEGREES:
        if getattr(args, name) < 1:
            raise ConfigurationError(f"{_option(name)} is {getattr(args, name)}.", fix="pass at least 1")
    if args.sequence_parallel and args.tensor_parallel_size == 1 and args.config is None:
        raise ConfigurationError(
            "--sequence-parallel has no effect without tensor parallelism.",
            fix="add --tensor-parallel-size, or leave it out",
        )
    if args.zero1 and args.fully_sharded:
        raise ConfigurationError(
            "--zero-1 and --fully-sharded exclude each other.",
            why="fully sharded parameters shard the optimizer state, too",
            fix="leave one of them out",
        )
    wanted: list[StrategyPlugin] = []
    if args.tensor_parallel_size > 1:
        wanted.append(TensorParallelPlugin(tensor_parallel_size=args.tensor_parallel_size))
    names = ("num_microbatches", "schedule", "virtual_stages")
    pipeline = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.pipeline_parallel_size > 1:
        wanted.append(PipelineParallelPlugin(pipeline_parallel_size=args.pipeline_parallel_size, **pipeline))
    elif pipeline:
        raise ConfigurationError(
            f"{', '.join(map(_option, pipeline))} have no effect without a pipeline.",
            fix="add --pipeline-parallel-size, or leave them out",
        )
    for chosen, kind in (
        (args.sequence_parallel, SequenceParallelPlugin),
        (args.zero1, Zero1Plugin),
        (args.fully_sharded, FullyShardedPlugin),
        (args.flash_attention, FlashAttentionPlugin),
        (args.chunked_loss, ChunkedLossPlugin),
    ):
        if chosen:
            wanted.append(kind())
    if args.recompute is not None:
        wanted.append(ActivationCheckpointingPlugin(modules=args.recompute))
    of_packages = [name for name in ("context_parallel", "expert_parallel") if getattr(args, f"{name}_size") > 1]
    entries = [{name: {f"{name}_size": getattr(args, f"{name}_size")}} for name in of_packages]
    return [*wanted, *load_config({"plugins": entries}).plugins]
