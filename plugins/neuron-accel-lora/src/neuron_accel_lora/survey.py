# SPDX-License-Identifier: Apache-2.0
"""Finds the layers that peft adapts in a model, by applying peft to a copy of the model's structure."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from neuron_accel.errors import ConfigurationError, UnsupportedModelError, UsageError, did_you_mean
from neuron_accel_lora.options import WHERE

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    from neuron_accel.contract import Run

ADAPTER = "default"
"""peft's default name of an adapter."""


@dataclass(kw_only=True)
class Target:
    """A layer and its adapter.

    Args:
        fqn: name of the layer.
        embedding: whether it is an embedding.
        turned: whether its weight has shape [in, out], as that of embeddings ([entries, features]).
        scaling: factor of the output of the adapter.
        dropout: probability of dropout of its inputs.
        a: initial value of A, [r, in].
        b: initial value of B, [out, r].
    """

    fqn: str
    embedding: bool
    turned: bool
    scaling: float
    dropout: float
    a: torch.Tensor
    b: torch.Tensor

    @property
    def weight(self) -> str:
        """FQN of the weight that is adapted."""
        return f"{self.fqn}.weight"

    @property
    def names(self) -> tuple[str, str]:
        """FQNs of the two factors of the adapter, as in peft."""
        if self.embedding:
            return f"{self.fqn}.lora_embedding_A.{ADAPTER}", f"{self.fqn}.lora_embedding_B.{ADAPTER}"
        return f"{self.fqn}.lora_A.{ADAPTER}.weight", f"{self.fqn}.lora_B.{ADAPTER}.weight"

    @property
    def stored(self) -> tuple[str, str]:
        """Names of the factors in peft's files."""
        a, b = (name.replace(f".{ADAPTER}", "") for name in self.names)
        return f"{PREFIX}{a}", f"{PREFIX}{b}"


PREFIX = "base_model.model."
"""Prefix of names in peft's files."""


@dataclass(kw_only=True)
class Survey:
    """The trained parameters of a model.

    Args:
        config: peft's configuration, with defaults filled in by peft.
        targets: the adapted layers, in the model's order.
        base: trained parameters of the base model: name in peft's files by FQN.
        count: number of elements that peft trains.
    """

    config: LoraConfig
    targets: list[Target]
    base: dict[str, str] = field(default_factory=dict)
    count: int = 0

    @property
    def trained(self) -> list[str]:
        """FQNs of all trained parameters."""
        return [*(name for target in self.targets for name in target.names), *self.base]


def take_survey(model: nn.Module, config: LoraConfig, *, values: bool = True) -> Survey:
    """Finds the layers to adapt, with initial values of their adapters, and freezes the other parameters of ``model``.

    Random numbers are drawn in the order of peft.

    Args:
        model: the unsharded model; its weights may be without memory.
        config: peft's configuration.
        values: whether adapters have values although the weights that they adapt have none. Not in a dry run.

    Raises:
        ConfigurationError: if a name or pattern of ``config`` matches no module.
        UnsupportedModelError: if a matching layer is not supported.
        UsageError: if ``model`` has adapters already.
    """
    if any(hasattr(module, "lora_A") or hasattr(module, "peft_config") for module in model.modules()):
        raise UsageError(
            f"This {type(model).__name__} has adapters already.",
            where=WHERE,
            why="layers that peft has wrapped cannot be sharded",
            fix="prepare the base model, and pass peft_config=... to LoraPlugin, or the saved adapter as adapter=...",
        )
    trained_before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        return _survey(model, config, values)
    except BaseException:
        for parameter, requires_grad in trained_before:
            parameter.requires_grad_(requires_grad)
        raise


def _survey(model: nn.Module, config: LoraConfig, values: bool) -> Survey:
    structure = _with_adapters(model, config, values)
    names = {parameter: name for name, parameter in model.named_parameters()}
    wrapped = dict(_layers(structure))
    targets = [_target(fqn, layer) for fqn, layer in wrapped.items()]
    if isinstance(config.target_modules, (list, set, tuple)):
        for entry in sorted(config.target_modules):
            if not any(_ends(fqn, entry) for fqn in wrapped):
                known = {fqn.rpartition(".")[2] for fqn, module in model.named_modules() if hasattr(module, "weight")}
                raise _nothing("target_modules", entry, known)
    count = sum(p.numel() for p in structure.parameters() if p.requires_grad)
    base = {}
    for name in (names[p] for p in model.parameters() if p.requires_grad):  # biases
        layer, _, own = name.rpartition(".")
        base[name] = f"{PREFIX}{layer}.base_layer.{own}" if layer in wrapped else f"{PREFIX}{name}"
    for name, parameter in _kept(model, config):
        if name not in base:
            base[name] = f"{PREFIX}{name}"
            parameter.requires_grad_(True)
    return Survey(config=config, targets=targets, base=base, count=count)


def _with_adapters(model: nn.Module, config: LoraConfig, values: bool) -> nn.Module:
    """A copy of a model's modules around the same parameters, with peft's layers in it. The parameters are frozen.

    With ``values``, parameters on the meta device are replaced in the copy: peft puts an adapter on the device of its
    layer."""
    from peft import inject_adapter_in_model

    shared: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    lazy = [p for p in model.parameters() if p.device.type == "meta"] if values else []
    shared |= {id(p): nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape)) for p in lazy}
    structure = copy.deepcopy(model, shared)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # for patterns without a match
            warnings.filterwarnings("ignore", "fan_in_fan_out")  # peft corrects it with a warning
            adapted = inject_adapter_in_model(config, structure, ADAPTER)
    except (ValueError, RuntimeWarning) as error:
        raise ConfigurationError(
            f"peft cannot adapt {type(model).__name__} like this.",
            where=WHERE,
            why=" ".join(str(error).split())[:600],
            fix="compare target_modules with the names of model.named_modules()",
        ) from error
    for parameter in lazy:
        parameter.requires_grad_(shared[id(parameter)].requires_grad)
    return adapted


def _layers(structure: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    from peft.tuners import lora

    for fqn, module in structure.named_modules():
        if not isinstance(module, lora.LoraLayer):
            continue
        base = module.get_base_layer()
        plain_table = type(base).forward is nn.Embedding.forward and not (
            base.max_norm or base.scale_grad_by_freq or base.sparse
        )
        if type(module) is not lora.Linear and not (type(module) is lora.Embedding and plain_table):
            raise UnsupportedModelError(
                f"{fqn!r}, a {type(base).__name__}, cannot be adapted.",
                where=WHERE,
                why="only linear layers and plain embeddings are supported",
                fix="leave it out with target_modules or exclude_modules",
            )
        yield fqn, module


def _target(fqn: str, layer: LoraLayer) -> Target:
    embedding = hasattr(layer, "lora_embedding_A") and ADAPTER in layer.lora_embedding_A
    if embedding:
        a, b = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
    else:
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return Target(
        fqn=fqn,
        embedding=embedding,
        turned=embedding or layer.fan_in_fan_out,
        scaling=layer.scaling[ADAPTER],
        dropout=0.0 if embedding else getattr(layer.lora_dropout[ADAPTER], "p", 0.0),
        a=_precise(a),
        b=_precise(b),
    )


def _precise(factor: nn.Parameter) -> torch.Tensor:
    """A factor in the dtype in which peft trains it: float32, also if the base model is in half precision."""
    value = factor.detach()
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _kept(model: nn.Module, config: LoraConfig) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of the modules in ``modules_to_save``."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for entry in config.modules_to_save or ():
        found = {fqn: module for fqn, module in model.named_modules() if _ends(fqn, entry)}
        if not found:
            known = {fqn.rpartition(".")[2] for fqn, _ in model.named_modules() if fqn}
            raise _nothing("modules_to_save", entry, known)
        for fqn, module in found.items():
            for own, parameter in module.named_parameters():
                if len(names[parameter]) > 1:
                    raise ConfigurationError(
                        f"'{fqn}.{own}' is tied to {', '.join(n for n in names[parameter] if n != f'{fqn}.{own}')!r}.",
                        where=f"{WHERE}, modules_to_save",
                        why="peft's file would contain one of the two, and merging would untie them",
                        fix="adapt it with target_modules, or build the model with tie_word_embeddings=False",
                    )
                yield f"{fqn}.{own}", parameter


def _ends(fqn: str, entry: str) -> bool:
    return fqn == entry or fqn.endswith(f".{entry}")


def _nothing(option: str, entry: str, known: set[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{entry!r} in {option} matches no module.",
        where=WHERE,
        why="it would have no effect",
        fix=did_you_mean(entry, known),
    )


@contextmanager
def in_turn(run: Run) -> Iterator[None]:
    """A context manager that the first rank enters before the others, since ranks that are threads share a random
    generator, and the values of the first rank are used. Collective."""
    first = run.backend.rank == 0
    if not first:
        run.backend.broadcast_object(None, run.world)
    try:
        yield
    finally:
        if first:
            run.backend.broadcast_object(None, run.world)


def agree_on_values(survey: Survey, run: Run) -> None:
    """Broadcasts the initial values of adapters from the first rank. Collective."""
    tensors = [tensor for target in survey.targets for tensor in (target.a, target.b)]
    if run.world.size == 1 or not run.backend.has_values:
        return
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = run.backend.broadcast(torch.cat([tensor.reshape(-1) for tensor in same]), run.world)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view_as(tensor))
