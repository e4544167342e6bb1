# SPDX-License-Identifier: Apache-2.0
"""A device ``neuron`` implemented in Python, with its tensors in CPU memory: a stand-in for the native Neuron device.

Tensors belong to torch's PrivateUse1 device, and their storages point to CPU memory. Every operation runs on CPU
tensors with the same memory, and is recorded with the shapes of its arguments. Only ranks import this module, because a
device cannot be removed from a process (:func:`install`).
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "neuron"
_DEVICE = torch.device("privateuseone", 0)
_SET = torch.ops.aten.set_.source_Storage_storage_offset
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


# ---- memory ----------------------------------------------------------------------------------------------------------
class Memory:
    """The CPU memory of a storage of the device. When the storage is resized to nothing, its memory cannot be used any
    more, but it keeps its addresses, as torch has no means to give a storage made in Python others; when it is resized
    to its size again, its bytes read as NaN.

    Attributes:
        present: the memory; None while the storage has none.
    """

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self._all = memory
        self.present: torch.UntypedStorage | None = memory

    def resize(self, nbytes: int) -> None:
        """The storage's ``resize_``."""
        if nbytes not in (0, self._all.nbytes()):
            raise RuntimeError(f"this storage has {self._all.nbytes()} bytes or none, not {nbytes}")
        if nbytes and self.present is None:
            self._all.fill_(255)  # type: ignore[attr-defined]  # not in its stubs
        self.present = self._all if nbytes == self._all.nbytes() else None


def storage_of(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the device that refers to CPU memory and keeps it alive."""
    storage: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), _DEVICE, memory.nbytes())
    storage.memory = Memory(memory)
    storage.resize_ = storage.memory.resize
    storage.clone = functools.partial(_clone, memory)  # torch's own needs an allocator written in C++
    return storage


def _clone(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage_of(memory.clone())


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the memory of a device tensor."""
    held = getattr(tensor.untyped_storage(), "memory", None)
    memory = torch.UntypedStorage(0) if held is None else held.present
    if memory is None:
        raise RuntimeError(f"the memory of a tensor of shape {tuple(tensor.shape)} was freed (its storage was resized)")
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def on_device(host: torch.Tensor, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
    """A device tensor with the memory of a CPU tensor.

    Args:
        host: the CPU tensor.
        storage: the device storage of this memory; None: a new one.
    """
    tensor = torch._C._acc.create_empty_tensor((0,), host.dtype)
    return _place(tensor, host, storage or storage_of(host.untyped_storage()))


def _place(tensor: torch.Tensor, like: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    return _SET.redispatch(_ON_CPU, tensor, storage, like.storage_offset(), like.size(), like.stride())


# ---- operations ------------------------------------------------------------------------------------------------------
class Runtime:
    """The state of the device in a process.

    Attributes:
        initialized: whether the device was used.
        kernels: operations with the shapes and dtypes of their arguments; a real device compiles each once.
    """

    def __init__(self) -> None:
        self.initialized = False
        self.kernels: set[tuple[Any, ...]] = set()
        self._random = torch.Generator().manual_seed(0).get_state()

    def begin(self) -> None:
        """Marks the device as used."""
        self.initialized = True

    @contextlib.contextmanager
    def random(self) -> Iterator[None]:
        """A context manager in which the random state of the device replaces that of the CPU."""
        outside = torch.default_generator.get_state()
        torch.default_generator.set_state(self._random)
        try:
            yield
        finally:
            self._random = torch.default_generator.get_state()
            torch.default_generator.set_state(outside)

    def manual_seed(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._random.clone()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.Generator().set_state(state)  # raises an error for an invalid state
        self._random = state.clone()

    # ---- one operation -----------------------------------------------------------------------------------------------
    def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs an operation on CPU tensors with the memory of the device tensors."""
        self.begin()
        call = _Call()
        host_args, host_kwargs = call.to_host(args), {name: call.to_host(value) for name, value in kwargs.items()}
        host_kwargs.pop("pin_memory", None)
        self.kernels.add((op, *call.shapes))
        draws, writes = torch.Tag.nondeterministic_seeded in op.tags, op._schema.is_mutable
        wanted = op._schema.arguments
        if any(isinstance(value, (int, float)) and _is_tensor(wanted[i]) for i, value in enumerate(args)):
            op = op.overloadpacket  # some operations distinguish Python numbers from tensors
        if draws:
            with self.random():
                result = op(*host_args, **host_kwargs)
        else:
            result = op(*host_args, **host_kwargs)
        if writes:
            call.follow()
        return call.to_device(result)


class _Call:
    """The device tensors of one operation and their CPU tensors."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the CPU tensor, which is kept here
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.shapes: list[tuple[Any, ...]] = []

    def to_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type != NAME:
                return value
            host = on_host(value)
            self._pairs[id(host)] = (host, value)
            self._storages[host.untyped_storage()._cdata] = value.untyped_storage()
            self.shapes.append((tuple(value.shape), value.dtype))
            return host
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_host(item) for item in value)
        if isinstance(value, torch.device) and value.type == NAME:
            _check_index(value.index)
            return torch.device("cpu")
        return value

    def to_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in self._pairs:
                return self._pairs[id(value)][1]
            return on_device(value, self._storages.get(value.untyped_storage()._cdata))
        if isinstance(value, (list, tuple)):
            return type(value)(self.to_device(item) for item in value)
        return value

    def follow(self) -> None:
        """Applies changes of shape and memory of CPU tensors to the device tensors, after an operation that writes."""
        for host, tensor in self._pairs.values():
            storage, memory = tensor.untyped_storage(), host.untyped_storage()
            moved = storage.data_ptr() != memory.data_ptr() or storage.nbytes() != memory.nbytes()
            if moved:
                storage = storage_of(memory)
                self._storages[memory._cdata] = storage
            if moved or host.size() != tensor.size() or host.stride() != tensor.stride():
                _place(tensor, host, storage)


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument.type, torch.TensorType)


def _check_index(index: int | None) -> None:
    if index not in (None, 0):
        raise RuntimeError(f"neuron:{index} does not exist: a process has one device, neuron:0")


# ---- autocast, with PyTorch's documented lists of operations ---------------------------------------------------------
_LOWER = """
_convolution _scaled_dot_product_attention_math addbmm addmm addmv addr baddbmm bmm conv1d conv2d conv3d
conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution linear matmul mm mv prelu
scaled_dot_product_attention
"""
_FLOAT = """
acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cosine_similarity cumprod cumsum dist
erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2
log_softmax.int logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
native_layer_norm nll_loss nll_loss2d nll_loss_nd norm.Scalar norm.ScalarOpt_dim poisson_nll_loss pow.Scalar
pow.Tensor_Scalar pow.Tensor_Tensor prod reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss
softmax.int softplus sum sum.dim_IntList tan triplet_margin_loss
"""
_WIDEST = "addcdiv addcmul atan2 bilinear cat cross dot index_put scatter_add stack"


def _register_autocast(library: torch.library.Library) -> None:
    key = "AutocastPrivateUse1"
    without = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(op: Any, dtype_of: Callable[[list[torch.Tensor]], torch.dtype]) -> Callable[..., Any]:
        def cast(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(without):
                found = list(_castable((args, kwargs)))
                dtype = dtype_of(found) if found else None
                return op(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})

        return cast

    for names, dtype_of in (
        (_LOWER, lambda found: torch.get_autocast_dtype(NAME)),
        (_FLOAT, lambda found: torch.float32),
        (_WIDEST, lambda found: max((t.dtype for t in found), key=lambda dtype: dtype.itemsize)),
    ):
        for name in names.split():
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, kernel(op, dtype_of), key)


def _castable(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.dtype != torch.float64 and value.device.type == NAME:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _castable(item)
    elif isinstance(value, dict):
        yield from _castable(list(value.values()))


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if any(True for _ in _castable(value)) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


# ---- torch.neuron ----------------------------------------------------------------------------------------------------
def _module(runtime: Runtime) -> types.ModuleType:
    """The module ``torch.neuron``, with the functions that are documented for the native device."""

    def set_device(device: Any) -> None:
        index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        _check_index(index)
        runtime.begin()

    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        set_device(device)
        yield

    def nothing() -> None:
        pass

    def synchronize(device: Any = None) -> None:
        pass

    module = types.ModuleType(f"torch.{NAME}", "A stand-in for the native Neuron device.")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: runtime.initialized,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=set_device,
        device=device,
        get_device_name=lambda device=None: "stand-in for a NeuronCore",
        synchronize=synchronize,
        empty_cache=nothing,
        manual_seed=runtime.manual_seed,
        manual_seed_all=runtime.manual_seed,
        get_rng_state=runtime.get_rng_state,
        set_rng_state=runtime.set_rng_state,
        get_amp_supported_dtype=lambda: [torch.float32, torch.float16, torch.bfloat16],
    )
    return module


def _load(storage: Any, location: str) -> torch.UntypedStorage | None:
    return storage_of(storage.cpu()) if location.partition(":")[0] == NAME else None


def _untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that torch.compile knows by its operation only, as those of a device are."""
    return torch.compiler.disable(kernel, reason="a kernel of the device")  # type: ignore[no-any-return]


def install(runtime: Runtime) -> list[torch.library.Library]:
    """Registers the device in this process. Returns the libraries, which have to be kept alive while it is used."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_module(runtime))
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    run = _untraced(runtime.run)
    every.fallback(run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")

    def set_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        return _SET.redispatch(_ON_CPU, tensor, storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))

    def set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return _place(tensor, source, source.untyped_storage())

    def set_view(tensor: torch.Tensor, storage: Any, offset: int, size: Any, stride: Any = ()) -> torch.Tensor:
        stride = stride or torch.empty(size, device="meta").stride()
        return _SET.redispatch(_ON_CPU, tensor, storage, offset, size, stride)

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        runtime.run(torch.ops.aten.copy_.default, target, source)
        return target

    def copy_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return copy_from(source, target.resize_(source.shape))

    # By name, beside the fallback, which torch does not find while it traces (torch.tensor(..., device="neuron")).
    for op in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
        aten.impl(op, functools.partial(run, op), "PrivateUse1")
    aten.impl("_copy_from", _untraced(copy_from), "PrivateUse1")
    aten.impl("_copy_from_and_resize", _untraced(copy_and_resize), "PrivateUse1")
    aten.impl("set_.source_Storage", _untraced(set_storage), "PrivateUse1")
    aten.impl("set_.source_Storage_storage_offset", _untraced(set_view), "PrivateUse1")
    aten.impl("set_.source_Tensor", _untraced(set_tensor), "PrivateUse1")
    # Pinned memory is an ordinary copy, since pinning has no benefit here.
    aten.impl("_pin_memory", lambda tensor, device=None: tensor.clone(), "CPU")
    _register_autocast(aten)
    torch.serialization.register_package(
        19,  # before torch's handler for such devices, which needs an allocator
        lambda storage: NAME if storage.device.type == NAME else None,
        _load,
    )
    return [every, aten]
