"""``loop/accelerate.pyi`` says what a NeuronAccelerator inherits from Accelerate: all of it, and nothing else."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import accelerate
import pytest

import neuron_accel.loop
from neuron_accel import NeuronAccelerator


@pytest.fixture(scope="module")
def accelerator():
    accelerator = NeuronAccelerator(backend="torch")
    yield accelerator
    accelerator.end_training()


def stated() -> dict[str, ast.stmt]:
    source = Path(neuron_accel.loop.__file__).with_name("accelerate.pyi").read_text(encoding="utf-8")
    (cls,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    names = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    return names | {ast.unparse(node.target): node for node in cls.body if isinstance(node, ast.AnnAssign)}


def test_every_public_name_is_stated(accelerator):
    ours = {name for cls in type(accelerator).__mro__ if _is_ours(cls) for name in vars(cls)}
    theirs = {name for name in {*dir(accelerate.Accelerator), *vars(accelerator)} if not name.startswith("_")}
    not_stated = theirs - ours - set(stated()) - {"run", "is_precompiling"}  # these two NeuronAccelerator sets itself
    assert not not_stated


def test_no_name_is_stated_that_there_is_not(accelerator):
    there = {*dir(accelerate.Accelerator), *vars(accelerator)}
    assert not set(stated()) - there


def test_methods_take_the_arguments_that_are_stated():
    for name, node in stated().items():
        # Accelerate wraps `init_trackers` without its arguments
        if isinstance(node, ast.FunctionDef) and name not in ("__init__", "init_trackers"):
            given = [arg.arg for arg in (*node.args.args, *filter(None, [node.args.vararg]))]
            method = getattr(accelerate.Accelerator, name)
            method = inspect.unwrap(method.fget if isinstance(method, property) else method)
            assert given == list(inspect.signature(method).parameters), name


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "neuron_accel"
