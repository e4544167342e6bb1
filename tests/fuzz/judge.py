"""Runs a case on ranks and in one process, and says whether both did the same."""

from __future__ import annotations

import contextlib
import io
import linecache
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuron_accel.errors import CommunicationError, DesyncError, NeuronAccelError, PluginError, RecompileError
from neuron_accel.testing.rank_errors import RanksError, RankTimeout
from neuron_accel.testing.ranks import run_ranks
from tests.fuzz.case import Case
from tests.fuzz.plain import Process
from tests.fuzz.program import render

SECONDS = 60.0
"""What a case may take; one that takes longer hangs."""
VAGUE = 0.1
"""A tolerance, relative to the value, at which a comparison says little."""
OWN_BREAKDOWNS = (CommunicationError, DesyncError, PluginError, RecompileError)
"""Errors of the project's own that are no refusal of a program: something went wrong before."""


class Record:
    """What a program reports while it runs, in its order.

    Args:
        folder: where it may save.
        clips: whether the program itself does what a plugin was told to do at every step.
    """

    def __init__(self, folder: str, *, clips: bool = False) -> None:
        self.folder, self._clips = folder, clips
        self.entries: list[tuple[str, Any]] = []

    def value(self, name: str, value: Any) -> None:
        self.entries.append((name, value.detach().clone() if isinstance(value, torch.Tensor) else float(value)))

    def rates(self, optimizer: Any) -> None:
        for index, group in enumerate(optimizer.param_groups):
            self.entries.append((f"learning rate {index}", float(group["lr"])))

    def tensors(self, name: str, values: Mapping[str, torch.Tensor]) -> None:
        self.entries.append((name, {key: value.detach().cpu().clone() for key, value in values.items()}))

    def gradients(self, accelerator: Any, model: nn.Module) -> None:
        self.tensors("gradients", accelerator.get_gradients(model))

    def weights(self, name: str, accelerator: Any, model: nn.Module) -> None:
        self.tensors(name, accelerator.get_state_dict(model))

    def clip_as_plugin(self, accelerator: Any, model: nn.Module, norm: float) -> None:
        if self._clips:
            accelerator.clip_grad_norm_(model.parameters(), norm)

    def finished(self) -> list[tuple[str, Any]]:
        """Everything on the host."""
        return [(n, v.cpu() if isinstance(v, torch.Tensor) else v) for n, v in self.entries]


def namespace_of(text: str) -> dict[str, Any]:
    """What a program defines; its lines are known to tracebacks."""
    name = "<program>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, name, "exec"), namespace)
    return namespace


def on_rank(text: str, folder: str) -> list[tuple[str, Any]]:
    """Runs a program on this rank."""
    from neuron_accel import NeuronAccelerator

    program = namespace_of(text)
    options = {**program["OPTIONS"], "plugins": program["PLUGINS"]}
    if program["BACKEND"] == "xla":
        options["backend"] = "xla"
    accelerator = NeuronAccelerator(config=options, **program["ARGUMENTS"])
    record = Record(folder)
    with _quiet() if program["BACKEND"] == "gloo" else contextlib.nullcontext():
        program["train"](accelerator, record)
    finished = record.finished()
    if not accelerator.is_main_process:  # others hold empty ones, which is as documented
        finished = [(name, value) for name, value in finished if not isinstance(value, dict)]
    accelerator.end_training()
    return finished


def in_one_process(text: str, ranks: int, noise: float, nudges: int) -> list[list[tuple[str, Any]]]:
    """Runs a program in this process: first as it is, then ``nudges`` times from weights that differ by rounding."""
    program = namespace_of(text)
    results = []
    for nudge in range(1 + nudges):
        options = dict(program["OPTIONS"])
        options.update(options.pop("dataloader", {}), backend=program["BACKEND"])
        record = Record("", clips=True)
        with _quiet():
            program["train"](Process(ranks, options, noise if nudge else 0.0, seed=nudge), record)
        results.append(record.finished())
    return results


# ---- comparing -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Precision:
    """How far a value may be off.

    Args:
        relative: to the largest entry of a tensor.
        floor: entries are held to at least this part of the largest tensor of its kind.
        noise: relative, of weights: what their last bits are.
        sensitivity: how often the effect of such a change of the weights counts as rounding.
        nudges: runs with changed weights, of which the largest effect counts, before a difference is a mismatch. Where
            a value has few bits, rounding sends an activation to the other side of a kink in some runs, in others not.
    """

    relative: float
    floor: float
    noise: float
    sensitivity: float = 50.0
    nudges: int = 1


PRECISIONS = {
    "float64": Precision(relative=1e-6, floor=1e-3, noise=1e-14),
    "float32": Precision(relative=1e-4, floor=5e-3, noise=2e-7),
    "float16": Precision(relative=1e-2, floor=0.1, noise=5e-4, nudges=12),
    "bfloat16": Precision(relative=5e-2, floor=0.2, noise=4e-3, sensitivity=4.0, nudges=12),
}


@dataclass
class Comparison:
    """What was found when two runs were held side by side."""

    wrong: list[str] = field(default_factory=list)
    vague: bool = False

    def value(
        self, name: str, expected: Any, nudged: Sequence[Any], found: Any, precision: Precision, scale: float = 0
    ) -> None:
        a, b, *others = (torch.as_tensor(v).detach() for v in (expected, found, *nudged))
        if a.shape != b.shape:
            self.wrong.append(f"{name} has shape {tuple(b.shape)} instead of {tuple(a.shape)}")
            return
        if not a.numel():
            return
        a, b, *others = (torch.view_as_real(v) if v.is_complex() else v for v in (a, b, *others))
        if not a.is_floating_point():
            if not torch.equal(a, b.to(a.dtype)):
                self.wrong.append(f"{name} is {b.flatten()[:4].tolist()} instead of {a.flatten()[:4].tolist()}")
            return
        a, b, *others = (v.double() for v in (a, b, *others))
        if not torch.equal(a.isfinite(), b.isfinite()):
            self.wrong.append(f"{name} is finite in one run only")
            return
        a, b, *others = (v.nan_to_num(0.0, 0.0, 0.0) for v in (a, b, *others))
        own = max(float(a.abs().max()), scale, 1e-9)
        slack = precision.sensitivity * max((float((a - c).abs().max()) for c in others), default=0.0)
        error = float((a - b).abs().max())
        self.vague |= slack > VAGUE * own and name.endswith("loss")
        if not error <= precision.relative * own + slack:
            shown = f"{float(b)!r} instead of {float(a)!r}" if a.ndim == 0 else f"off by {error:.3g} of {own:.3g}"
            self.wrong.append(f"{name} is {shown}")


def compare(expected: list, nudged: Sequence[list], found: list, precision: Precision) -> Comparison:
    """Holds what ranks recorded to what one process did, and did with changed weights."""
    result = Comparison()
    if len(expected) != len(found):
        result.wrong.append(f"{len(found)} values were recorded instead of {len(expected)}")
    rates = Precision(relative=1e-6, floor=0, noise=0)
    for index, ((name, a), (other, b), *others) in enumerate(zip(expected, found, *nudged, strict=False)):
        changed = [value for _, value in others]
        place = f"[{index}] {name}"
        if name != other:
            result.wrong.append(f"{place} is the next value, but the ranks recorded {other}")
            break
        if not isinstance(a, dict):
            result.value(place, a, changed, b, rates if name.startswith("learning rate") else precision)
            continue
        largest = max((float(v.abs().max()) for v in a.values() if v.is_floating_point() and v.numel()), default=0.0)
        for key in sorted({*a, *b}):
            if key not in a or key not in b:
                value = a.get(key, b.get(key))
                if name == "gradients" and not value.any():  # none and zero are the same to a step
                    continue
                result.wrong.append(f"{place}: only {'one process' if key in a else 'the ranks'} has {key}")
            else:
                values = [c.get(key, a[key]) for c in changed]
                result.value(f"{place} {key}", a[key], values, b[key], precision, largest * precision.floor)
    return result


def compare_all(expected: list, nudged: Sequence[list], found: list[list], precision: Precision) -> Comparison:
    """The same for all ranks; those after the first record no tensors by name."""
    result = compare(expected, nudged, found[0], precision)
    values, *changed = ([(n, v) for n, v in run if not isinstance(v, dict)] for run in (expected, *nudged))
    for rank, others in enumerate(found[1:], start=1):
        theirs = compare(values, changed, others, precision)
        result.wrong += [f"rank {rank}: {line}" for line in theirs.wrong]
    return result


def compare_ranks(expected: list, found: list[list]) -> Comparison:
    """What can be said without a reference: ranks recorded the same, and one process did, but for its numbers."""
    result, same = Comparison(), Precision(relative=1e-6, floor=0, noise=0)
    for rank, entries in enumerate(found):
        recorded = expected if rank == 0 else [(n, v) for n, v in expected if not isinstance(v, dict)]
        if [name for name, _ in entries] != [name for name, _ in recorded]:
            result.wrong.append(f"rank {rank} recorded other values than one process")
            continue
        for (name, a), (_, b) in zip(recorded, entries, strict=True):
            pairs = [(f"{name} {k}", a[k], b.get(k)) for k in a] if isinstance(a, dict) else [(name, a, b)]
            for place, one, other in pairs:
                if other is None and name == "gradients":
                    continue
                if other is None or torch.as_tensor(one).shape != torch.as_tensor(other).shape:
                    result.wrong.append(f"rank {rank}: {place} is missing or has another shape")
                elif not torch.as_tensor(other).isfinite().all():
                    result.wrong.append(f"rank {rank}: {place} is not finite")
    if not result.wrong:
        first = [(n, v) for n, v in found[0] if not isinstance(v, dict)]
        for rank, entries in enumerate(found[1:], start=1):
            for (name, a), (_, b) in zip(first, entries, strict=True):
                result.value(f"rank {rank}: {name}, beside rank 0,", a, (), b, same)
    return result


# ---- a verdict -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Args:
        kind: ``"ok"``, ``"vague"`` (ok, but rounding alone changes the result much), ``"refused"``, ``"failed"``
            (a mismatch, an error that is not the project's own, or too much time), ``"invalid"`` (one process cannot
            run the program either, which is the fuzzer's fault).
        detail: what differs, or the error.
        sort: what shrinking keeps: mismatches of one kind, errors of one type.
    """

    case: Case
    kind: str
    detail: str = ""
    sort: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.kind in ("failed", "invalid")


def judge(case: Case, *, seconds: float = SECONDS) -> Verdict:
    """Runs a case on ranks and in one process."""
    text = render(case)
    precision = PRECISIONS[case.precision]
    if "batch" in case.model:  # rows that are nearly equal have statistics of rounding
        precision = replace(precision, sensitivity=50.0)
    return judge_text(text, case.mesh.ranks, case.mesh.data_ranks, precision, case, seconds=seconds)


def judge_text(
    text: str, ranks: int, data_ranks: int, precision: Precision, case: Case, *, seconds: float = SECONDS
) -> Verdict:
    """The same for the text of a program."""
    began = time.monotonic()

    def verdict(kind: str, detail: str = "", sort: str = "") -> Verdict:
        return Verdict(case, kind, detail, sort or kind, time.monotonic() - began)

    def alone(nudges: int) -> list[list[tuple[str, Any]]]:
        noise = precision.noise
        return run_ranks(in_one_process, 1, text, data_ranks, noise, nudges, timeout=nudges * seconds, backend=None)[0]

    try:
        expected, *nudged = alone(1)
    except RanksError as error:
        return verdict("invalid", _told(error), f"invalid {type(error.__cause__).__name__}")
    with tempfile.TemporaryDirectory(prefix="neuron-accel-fuzz-") as folder:
        try:
            found = run_ranks(on_rank, ranks, text, folder, timeout=seconds, backend=case.backend)
        except RanksError as error:
            cause = error.__cause__
            # As the guide says of seeds by process after prepare, and of norms of shards.
            said = (case.seeds == "set_seed" or case.clip_by) and case.mesh.holders > 1
            if (said and isinstance(cause, DesyncError)) or (
                isinstance(cause, NeuronAccelError) and not isinstance(cause, OWN_BREAKDOWNS)
            ):
                first = str(cause).splitlines()[0]
                return verdict("refused", f"{type(cause).__name__}: {first}", f"refused {type(cause).__name__}")
            hang = all(isinstance(e, RankTimeout) for e in error.errors.values())
            return verdict("failed", _told(error), "hang" if hang else f"error {type(cause).__name__}")
    if case.own_masks:
        result = compare_ranks(expected, found)
        wrong = "not as it should be:\n  " + "\n  ".join(result.wrong[:12])
        return verdict("failed", wrong, "mismatch") if result.wrong else verdict("ok")
    result = compare_all(expected, nudged, found, precision)
    if result.wrong and precision.nudges > 1:
        result = compare_all(expected, alone(precision.nudges)[1:], found, precision)
    if result.wrong:
        return verdict("failed", "not like one process:\n  " + "\n  ".join(result.wrong[:12]), "mismatch")
    return verdict("vague" if result.vague else "ok")


def _told(error: RanksError) -> str:
    text = str(error)
    return text if len(text) < 6000 else text[:3000] + "\n[...]\n" + text[-3000:]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what libraries say to itself, unless something fails."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except BaseException:
        sys.stdout.write(said.getvalue())
        raise


def check_file(path: str) -> None:
    """What a printed program does when it is run: the comparison with one process."""
    text = Path(path).read_text()
    program = namespace_of(text)
    case: Case = eval(program["__doc__"].splitlines()[0], {"Case": Case})
    precision = PRECISIONS[case.precision]
    verdict = judge_text(text, program["RANKS"], case.mesh.data_ranks, precision, case)
    print(f"{verdict.kind} after {verdict.seconds:.1f} s\n{verdict.detail}")
