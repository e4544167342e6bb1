"""The files that one step, one prepared model and one save go through, and the sizes of the package.

Usage: ``python -m benchmarks.reading [--json]``. Two gloo ranks train a Llama of two layers; on the first one every
Python function of ``neuron_accel`` that is entered is recorded (``sys.setprofile``, so nothing of C). A hop is a call
or a return that goes from one file to another. A thermometer of the floor plan, not a target.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from neuron_accel.testing import run_ranks

PACKAGE = Path(__file__).parents[1] / "neuron_accel"


class Walk:
    """Files of the package in the order in which they are entered."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.functions: set[tuple[str, str]] = set()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """A context manager that records the files that are entered."""
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back if event == "return" else frame
        if event not in ("call", "return") or caller is None or not caller.f_code.co_filename.startswith(str(PACKAGE)):
            return
        file = str(Path(caller.f_code.co_filename).relative_to(PACKAGE))
        self.functions.add((file, caller.f_code.co_qualname if sys.version_info >= (3, 11) else caller.f_code.co_name))
        if not self.files or self.files[-1] != file:
            self.files.append(file)

    def facts(self) -> dict[str, Any]:
        return {
            "files": len(set(self.files)),
            "functions": len(self.functions),
            "hops": max(0, len(self.files) - 1),
            "in order": list(dict.fromkeys(self.files)),
        }


def walk(plugins: str, folder: str) -> dict[str, Any]:
    """Records one composition on one rank."""
    import torch

    from neuron_accel import NeuronAccelerator, Zero1Plugin
    from neuron_accel.testing._cases import tiny_llama, token_batches

    walks = {name: Walk() for name in ("prepare_model", "prepare_optimizer", "step", "save_state", "load_state")}
    accelerator = NeuronAccelerator(cpu=True, plugins=[Zero1Plugin()] if plugins == "zero1" else [])
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with walks["prepare_model"].recorded():
        model = accelerator.prepare_model(model)
    with walks["prepare_optimizer"].recorded():
        optimizer = accelerator.prepare_optimizer(optimizer)
    batch = token_batches(1)[0]

    def step() -> None:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with walks["step"].recorded():
        step()
    with walks["save_state"].recorded():
        accelerator.save_state(folder)
    with walks["load_state"].recorded():
        accelerator.load_state(folder)
    return {name: each.facts() for name, each in walks.items()}


def sizes() -> dict[str, Any]:
    """The sizes of the files of the package."""
    files = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    lengths = {path: len(text.splitlines()) for path, text in files.items()}
    return {
        "files": len(files),
        "files under 60 lines, without __init__": sum(
            n < 60 for path, n in lengths.items() if path.name != "__init__.py"
        ),
        "lines": sum(lengths.values()),
        "lines of code": sum(code_lines(text) for text in files.values()),
        "lines of accelerator.py": lengths[PACKAGE / "accelerator.py"],
        "longest file": max((n, str(path.relative_to(PACKAGE))) for path, n in lengths.items()),
    }


def code_lines(text: str) -> int:
    """Lines that are neither blank, comment nor documentation."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documentation |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(1 for i, line in lines if i not in documentation and line.strip() and not line.strip().startswith("#"))


def main(arguments: list[str] | None = None, show: Callable[[str], None] = print) -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print everything as JSON, with the files in order")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"sizes": sizes()}
    for plugins in ("data parallel", "zero1"):
        with tempfile.TemporaryDirectory() as folder:
            found[plugins] = run_ranks(walk, 2, plugins, folder, timeout=300)[0]
    if options.json:
        show(json.dumps(found, indent=2))
        return
    for name, value in found["sizes"].items():
        show(f"{name}: {value}")
    for plugins in ("data parallel", "zero1"):
        show(f"\n{plugins:20} files  functions  hops")
        for name, facts in found[plugins].items():
            show(f"{name:20} {facts['files']:5}  {facts['functions']:9}  {facts['hops']:4}")


if __name__ == "__main__":
    main()
