"""What one layout of one model needs: the memory of a rank by part, its traffic by axis, and its operations."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.backends.select import DryRun
from neuron_accel.engine.plan.config import load_config
from neuron_accel.errors import ConfigurationError, PlanError
from neuron_accel.models.support import model_without_weights
from neuron_accel.neuron.instances import Instance, find_instance

if TYPE_CHECKING:
    import torch
    from torch import nn

    from neuron_accel.accelerator import NeuronAccelerator
    from neuron_accel.engine.plan.plugin import StrategyPlugin
    from neuron_accel.planning.step import StepCount

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class LayoutCount:
    """What one rank of a layout keeps, sends and computes in one optimizer step.

    Args:
        model: name of the model's class.
        parameters: number of parameters of the model.
        mesh: the mesh, as text.
        plugins: names of the plugins, those that the planner added included.
        rank: the rank that was counted.
        micro_batch: samples of a data-parallel rank in a micro-batch.
        accumulation: micro-batches in a step.
        sequence: tokens in a sample.
        layers: number of blocks of the model.
        extrapolated: whether the count is that of few blocks, extrapolated. Messages in buckets are then approximate,
            bytes exact but for the padding of buckets, and operations exact.
        step: what was counted.
        instance: the instance type, or None.
        core_bytes: memory of one of its cores, or None.
    """

    model: str
    parameters: int
    mesh: str
    plugins: tuple[str, ...]
    rank: int
    micro_batch: int
    accumulation: int
    sequence: int
    layers: int
    extrapolated: bool
    step: StepCount
    instance: str | None = None
    core_bytes: int | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the peak of memory is at most that of a core; None without an instance. What the runtime and compiled
        graphs take is not counted."""
        return None if self.core_bytes is None else self.step.peak.total <= self.core_bytes

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain numbers and text: bytes, operations, messages."""
        peak = self.step.peak
        plain = {key: value for key, value in vars(self).items() if key != "step"}
        return {
            **plain,
            "plugins": list(self.plugins),
            "fits": self.fits,
            "memory": {"total": peak.total, "moment": str(peak.moment), "parts": dict(peak.parts)},
            "traffic": [asdict(flow) for flow in self.step.flows],
            "operations": self.step.operations,
            "uncounted": list(self.step.uncounted),
        }


def plan(
    model: str | os.PathLike[str] | Any,
    *,
    world_size: int,
    global_batch: int,
    sequence: int,
    plugins: Sequence[StrategyPlugin] = (),
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    accumulation: int | None = None,
    instance: str | None = None,
    dtype: str = "bfloat16",
    attention: str = "eager",
    rank: int = 0,
    full_depth: bool = False,
) -> LayoutCount:
    """Counts what one rank of a layout needs, by running it dry: the plan, ``prepare``, forward and backward passes and
    the step of AdamW are those of a real run, on tensors without memory. Nothing is loaded and no other rank exists.

    Args:
        model: a folder with a transformers ``config.json``, that file, or a configuration object, of a causal language
            model.
        world_size: number of ranks.
        global_batch: samples in an optimizer step, over all ranks.
        sequence: tokens in a sample.
        plugins: the strategies.
        config: further strategies, and ``gradient_accumulation_steps``: as for ``NeuronAccelerator``.
        accumulation: micro-batches in a step; by default those of ``config``, or 1.
        instance: instance type, whose limits the layout is held to and whose core memory is compared to.
        dtype: dtype of the weights, ``"bfloat16"`` or ``"float32"``.
        attention: ``attn_implementation`` of transformers.
        rank: the rank that is counted.
        full_depth: whether to run all blocks, instead of two and three and extrapolating.

    Raises:
        ConfigurationError: for an unknown model, instance or option.
        PlanError: if the plugins cannot run together, on this many ranks or hardware, or the batch does not divide.
        LayoutError: if the model cannot be sharded so.
        UnsupportedModelError: if no plan covers the model.
    """
    found = None if instance is None else find_instance(instance)
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype={dtype!r} is not possible.", fix=f"pass {' or '.join(DTYPES)}")
    for name, number in (("world_size", world_size), ("global_batch", global_batch), ("sequence", sequence)):
        if number < 1:
            raise ConfigurationError(f"{name} is {number}.", fix="pass at least 1")
    described = _configuration(model)
    described._attn_implementation, described.use_cache = attention, False
    _check_sequence(described, sequence)
    options: dict[str, Any] = {"plugins": plugins, "backend": DryRun(world_size=world_size, rank=rank)}
    if config is not None:
        steps = load_config(config).accelerate.get("gradient_accumulation_steps", 1)
        if accumulation is not None and accumulation != steps and steps != 1:
            raise ConfigurationError(
                f"accumulation={accumulation} and the configuration's {steps} contradict each other.",
                fix="leave one of them out",
            )
        options["config"] = config
    if accumulation is not None and (config is None or steps == 1):
        options["gradient_accumulation_steps"] = accumulation
    layout = _Layout(options, global_batch, sequence, dtype, found)
    layers = getattr(described, "num_hidden_layers", 0)
    full = model_without_weights(described)
    blocks = None if full_depth else _alike_blocks(described, full)
    if blocks is None:
        count = layout.count(described, None)
    else:
        from neuron_accel.planning.step import DEPTHS, extrapolate

        shallow = [layout.count(_with_depth(described, depth), blocks) for depth in DEPTHS]
        count = extrapolate(shallow, layers, blocks)
    return LayoutCount(
        model=type(full).__name__,
        parameters=_numel(full),
        mesh=layout.mesh,
        plugins=layout.plugins,
        rank=rank,
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        sequence=sequence,
        layers=layers,
        extrapolated=blocks is not None,
        step=count,
        instance=instance,
        core_bytes=None if found is None else found.core_bytes(),
    )


class _Layout:
    """Counts models on one layout.

    Args:
        options: arguments of the accelerator.
        global_batch, sequence, dtype: see :func:`plan`.
        instance: the instance, or None.
    """

    def __init__(
        self, options: dict[str, Any], global_batch: int, sequence: int, dtype: str, instance: Instance | None
    ) -> None:
        self._options, self._global_batch, self._sequence = options, global_batch, sequence
        self._dtype, self._instance = dtype, instance
        self.mesh, self.micro_batch, self.accumulation = "", 0, 0
        self.plugins: tuple[str, ...] = ()

    def count(self, config: Any, blocks: str | None) -> StepCount:
        """Counts a step of the model of ``config``."""
        import torch

        from neuron_accel.planning.step import count_step

        with _accelerate_set_aside():
            from neuron_accel.accelerator import NeuronAccelerator

            accelerator = NeuronAccelerator(**self._options)
            self._describe(accelerator)
            shape = (self.micro_batch, self._sequence)

            def build() -> nn.Module:
                return model_without_weights(config).to(getattr(torch, self._dtype))

            def batch() -> dict[str, torch.Tensor]:
                ids = torch.zeros(shape, dtype=torch.int64, device=accelerator.device)
                return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

            return count_step(accelerator, build, batch, blocks=blocks)

    def _describe(self, accelerator: NeuronAccelerator) -> None:
        if self._instance is not None:
            self._instance.hardware().check_mesh(accelerator.plan.mesh)
        self.mesh = str(accelerator.plan.mesh)
        self.plugins = tuple(plugin.spec.name for plugin in accelerator.plan.plugins)
        self.accumulation = accelerator.gradient_accumulation_steps
        parts = accelerator.data_parallel_size * self.accumulation
        self.micro_batch, rest = divmod(self._global_batch, parts)
        if rest or not self.micro_batch:
            below = self._global_batch - rest
            near = [f"{batch}" for batch in (below, below + parts) if batch]
            raise PlanError(
                f"A global batch of {self._global_batch} samples cannot be split evenly.",
                where=f"mesh {self.mesh}",
                why=f"there are {accelerator.data_parallel_size} data-parallel ranks with {self.accumulation} "
                "micro-batches each",
                fix=f"choose a global batch of {' or '.join(near)}, or other degrees",
            )


@contextmanager
def _accelerate_set_aside() -> Iterator[None]:
    """A context in which Accelerate's state, which all accelerators of a process share, is a new one."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    classes = (PartialState, AcceleratorState, GradientState)
    kept = [dict(cls._shared_state) for cls in classes]
    for cls in classes:
        cls._shared_state.clear()
    try:
        yield
    finally:
        for cls, state in zip(classes, kept, strict=True):
            cls._shared_state.clear()
            cls._shared_state.update(state)


# ---- the model -------------------------------------------------------------------------------------------------------
def _configuration(model: Any) -> Any:
    """A copy of the transformers configuration that ``model`` is, or names."""
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(model, PretrainedConfig):
        return copy.deepcopy(model)
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigurationError(
            f"There is no {file}.",
            where="model",
            why="the configuration of a model is read from disk; nothing is downloaded, and no weights are needed",
            fix="pass a folder with a config.json of transformers, or that file",
        )
    try:
        kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        if kind is None:
            raise ValueError("it has no model_type")
        return AutoConfig.from_pretrained(file)
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise ConfigurationError(
            f"{file} is not a configuration of transformers.",
            where="model",
            why=str(error).splitlines()[0],
            fix="pass the config.json that save_pretrained writes beside a model",
        ) from error


def _check_sequence(config: Any, sequence: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < sequence:
        raise ConfigurationError(
            f"A sequence of {sequence} tokens is longer than the model allows.",
            where="max_position_embeddings of the model",
            why=f"it has {longest} positions",
            fix=f"choose at most {longest} tokens, or change the model's configuration",
        )


def _with_depth(config: Any, depth: int) -> Any:
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = depth
    if isinstance(getattr(shallow, "layer_types", None), list):
        shallow.layer_types = shallow.layer_types[:depth]
    return shallow


def _alike_blocks(config: Any, full: nn.Module) -> str | None:
    """FQN of the list of the model's blocks, if they are alike and more than those that are run; else None."""
    from torch import nn

    from neuron_accel.planning.step import DEPTHS

    depth = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layer_types", None) or [None]
    lists = [
        name for name, module in full.named_modules() if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not isinstance(depth, int) or depth <= max(DEPTHS) or len(set(kinds)) > 1 or len(lists) != 1:
        return None
    found = full.get_submodule(lists[0]).children()
    shapes = [[(name, p.shape) for name, p in block.named_parameters()] for block in found]
    return lists[0] if all(shape == shapes[0] for shape in shapes) else None


def _numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
