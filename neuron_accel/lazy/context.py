# SPDX-License-Identifier: Apache-2.0
"""The context in which models are built and loaded without memory for their weights.

A checkpoint may contain both of two weights that a model ties; one of pickled weights always does. transformers then
compares them, and ties them if they are equal. It cannot compare tensors without values, so that is done here.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from neuron_accel.engine.plan.mesh import AxisKind
from neuron_accel.lazy.filling import MARK
from neuron_accel.lazy.mapped import MappedTensor, Mappings, Reader
from neuron_accel.lazy.recording import Recorder, Recording

_log = logging.getLogger(__name__)
_ROWS = 4 << 20


def tie_equal(model: nn.Module, recording: Recording) -> None:
    """Ties the parameters that a model of transformers declares as tied, if both are read from files and are equal
    there."""
    declared: dict[str, Any] = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in declared.items():
        try:
            one, other = model.get_parameter(target), model.get_parameter(source)
        except AttributeError:
            continue
        if one is other:
            continue
        first, second = recording.source_of(one), recording.source_of(other)
        if first is None or second is None:
            continue
        if equal(first, second):
            owner, _, name = target.rpartition(".")
            setattr(model.get_submodule(owner), name, other)
        else:
            _log.warning(
                "%s and %s are declared tied, but the files hold different values, so they are not tied.",
                target,
                source,
            )


def equal(one: MappedTensor, other: MappedTensor) -> bool:
    """Returns whether two tensors in files have equal values. Reads both unless they are at the same offset of a
    file."""
    if (one.path, one.offset) == (other.path, other.offset):
        return True
    if one.shape != other.shape or one.tensor.dtype != other.tensor.dtype or not one.shape:
        return False
    rows = max(1, _ROWS // max(1, one.tensor[0].numel()))
    with Reader() as reader:
        for begin in range(0, one.shape[0], rows):
            bounds = ((begin, min(begin + rows, one.shape[0])), *((0, size) for size in one.shape[1:]))
            parts = []
            for tensor in (one, other):
                parts.append(torch.empty([stop - start for start, stop in bounds], dtype=tensor.tensor.dtype))
                reader.read(tensor, bounds, parts[-1])
            if not torch.equal(*parts):
                return False
    return True


# ---- The context -----------------------------------------------------------------------------------------------------
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that makes transformers convert weights in the thread that loads a model."""


@contextmanager
def lazy_load_for_parallelism(
    *, tensor_parallel_size: int | None = None, pipeline_parallel_size: int | None = None
) -> Iterator[None]:
    """A context in which models are built and loaded without allocating memory for their weights.

    ``from_pretrained`` reads only the headers of files, and ``from_config`` draws no random numbers. ``prepare``
    computes the layout, and each rank then reads only its own tensors: the slices of its tensor-parallel shards, and
    the layers of its pipeline stages. Buffers are computed, weights stay tied, dtypes are those requested, and
    transformers' conversions of a checkpoint (renamed keys, stacked experts, transposed weights) are applied to the
    slices. For other conversions the full tensor is built temporarily. transformers reports missing, unexpected and
    mismatched weights as usual. Pickled weights are memory-mapped, and only tensors are unpickled.

    A model that is built from its configuration gets, at every degree, bitwise the weights of a single process without
    this context: in ``prepare`` every rank draws all random numbers in the original order, and keeps its shards. The
    context does not advance the global random number generator, so numbers drawn after it differ from those without it.

    Inside the context tensors have no values, so a model that reads them in its constructor cannot be built. A model
    may be changed inside (for example by ``resize_token_embeddings(..., mean_resizing=False)``) and cast anywhere;
    otherwise it must not be changed between the context and ``prepare``. :func:`~neuron_accel.lazy.materialize` loads
    the full weights without an accelerator. Files are located through Linux's list of memory maps; on other systems the
    context has no effect.

    Args:
        tensor_parallel_size, pipeline_parallel_size: optional; if given, ``prepare`` checks that the plugins have the
            same degrees.

    Example::

        with lazy_load_for_parallelism():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model, optimizer = accelerator.prepare(model, optimizer)
    """
    given = {AxisKind.MODEL: tensor_parallel_size, AxisKind.STAGE: pipeline_parallel_size}
    recording = Recording(degrees={kind: degree for kind, degree in given.items() if degree is not None})

    def mark(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and recording.knows(tensor):
            view = recording.view(tensor)
            vars(module).setdefault(MARK, {})[name] = (recording, view)
            if torch.get_default_device().type == "meta":  # from_pretrained builds a model on the meta device
                recording.phantoms.add(view.memory)

    owners: dict[nn.Module, None] = {}

    def find_owner(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if hasattr(type(module), "base_model_prefix"):
            owners.setdefault(module)

    with ExitStack() as stack:
        for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
            stack.callback(register(mark).remove)
        stack.callback(register_module_module_registration_hook(find_owner).remove)
        stack.enter_context(_set(_IN_TURN, "1"))
        stack.enter_context(_Values(recording, stack.enter_context(Recorder(recording))))
        yield
    for module in owners:
        tie_equal(module, recording)


class _Values(TorchFunctionMode):
    """Handles functions that give tensors values and that a dispatch mode does not see: copies and casts of mapped
    tensors, tensors made of Python numbers, and initialisations that skip meta tensors."""

    def __init__(self, recording: Recording, recorder: Recorder) -> None:
        super().__init__()
        self._recording, self._recorder, self._mappings = recording, recorder, Mappings()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and args[0].device.type == "cpu":
            wanted = [*args[1:], *kwargs.values()]
            dtype = next((value for value in wanted if isinstance(value, torch.dtype)), args[0].dtype)
            elsewhere = any(_is_elsewhere(value) for value in wanted)
            source = None if elsewhere else self._mappings.find(args[0])
            if source is not None:
                with self._recorder.paused():
                    return self._recording.add_source(source, dtype)
        # On the meta device the data would be lost. transformers uses an empty list to find out the default device.
        if func in (torch.tensor, torch.as_tensor) and _is_meta(kwargs.get("device")) and not _is_empty(args[0]):
            return func(*args, **{**kwargs, "device": torch.device("cpu")})
        # safetensors views mapped memory in this way.
        if func is torch.asarray and isinstance(args[0], torch.UntypedStorage):
            with self._recorder.paused():
                return func(*args, **kwargs)
        if func == _IS_META and self._recording.knows(args[0]):
            self._note_initialisation(args[0], sys._getframe(1))
        return func(*args, **kwargs)

    def _note_initialisation(self, tensor: torch.Tensor, asking: FrameType) -> None:
        """Records a call of a function of ``torch.nn.init`` that returns early for meta tensors."""
        code = asking.f_code
        function = getattr(torch.nn.init, code.co_name, None)
        if code.co_filename != torch.nn.init.__file__ or function is None:
            return
        given = {name: asking.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
        if given.pop("tensor", None) is tensor:
            with self._recorder.paused():
                self._recording.add_initialisation(function, tensor, given)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _is_empty(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and not data


def _is_elsewhere(value: Any) -> bool:
    """Returns whether an argument of ``Tensor.to`` is another device than the CPU, or may be one."""
    if isinstance(value, (str, torch.device)):
        return torch.device(value).type not in ("cpu", "meta")
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and not isinstance(value, bool))


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
