# SPDX-License-Identifier: Apache-2.0
"""Training arguments that select strategies, also as command-line flags through ``HfArgumentParser``."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import neuron_accel.loop.accelerate  # isort: skip  # noqa: F401  first: transformers' Trainer imports Accelerate
import torch
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.training_args import OptimizerNames

from neuron_accel.backends.select import connect, settle
from neuron_accel.engine.plan.config import load_config
from neuron_accel.engine.plan.planner import make_plan
from neuron_accel.engine.plan.plugin import Claim, StrategyPlugin
from neuron_accel.engine.plan.registry import default_registry
from neuron_accel.errors import ConfigurationError, PlanError
from neuron_accel.loop.host_barrier import wait_on_host
from neuron_accel.storage import is_url
from neuron_accel.trainer.optimum import OptimumArguments

if TYPE_CHECKING:
    from neuron_accel.engine.plan.mesh import Mesh
    from neuron_accel.engine.plan.plan import Plan

_OF_THE_TRAINER = {
    "mixed_precision": "bf16 or fp16",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "cpu": "use_cpu",
}
_BYPASSES = {
    "deepspeed": "zero_1 or fully_sharded",
    "fsdp": "fully_sharded",
    "parallelism_config": "tensor_parallel_size and pipeline_parallel_size",
}


@dataclass
class StrategyArguments(OptimumArguments):
    """Arguments that select strategies; a mixin that has to come before a class of transformers' training arguments::

        @dataclass
        class MyArguments(StrategyArguments, SFTConfig): ...

    Attributes:
        decision: the backend of the run with the reason, chosen when the arguments are constructed.

    Raises:
        ConfigurationError: if a value is invalid, or an argument has no effect or bypasses the strategies.
        PlanError: if the strategies cannot run together.
    """

    fully_sharded: bool = field(
        default=False,
        metadata={"help": "Shard parameters, gradients and the optimizer over data-parallel ranks (ZeRO-3)."},
    )
    tensor_parallel_size: int = field(default=1, metadata={"help": "Number of ranks over which each layer is sharded."})
    pipeline_parallel_size: int = field(default=1, metadata={"help": "Number of pipeline stages."})
    pipeline_parallel_num_microbatches: int = field(
        default=-1,
        metadata={"help": "Number of micro-batches per batch of a rank; -1: the per-device batch size."},
    )
    pipeline_parallel_schedule: str = field(
        default="1f1b", metadata={"help": "1f1b, gpipe, interleaved or zero-bubble; see `neuron-accel schedule`."}
    )
    disable_embedding_parallelization: bool = field(
        default=False, metadata={"help": "Do not shard token embedding and head over tensor-parallel ranks."}
    )
    disable_sequence_parallel: bool = field(
        default=False,
        metadata={"help": "Do not shard activations between tensor-parallel layers along the sequence."},
    )
    kv_size_multiplier: int | None = field(
        default=None,
        metadata={
            "help": "Tensor-parallel ranks per key/value head. Derived automatically; a value is only validated."
        },
    )
    async_save: bool = field(default=False, metadata={"help": "Write checkpoints in the background, from host memory."})
    consolidate_at_end: bool = field(
        default=False,
        metadata={"help": "Write the full model to output_dir after training, in transformers' format."},
    )
    keep_batch: bool = field(
        default=False,
        metadata={
            "help": "When training resumes on another number of ranks, change gradient_accumulation_steps so that a "
            "step has as many samples as before."
        },
    )
    plugins: list[str] | None = field(
        default=None,
        metadata={"help": "Names of further strategy plugins, or in code plugin objects. See `neuron-accel plugins`."},
    )
    neuron_config: str | None = field(
        default=None, metadata={"help": "A YAML file with plugins and their options; added to the other arguments."}
    )

    def __post_init__(self) -> None:
        self._fill_in_defaults()
        self._check_values()
        theirs: Any = self  # the type of the class that follows this mixin
        self.decision = settle(os.environ, cpu=bool(theirs.use_cpu))
        if self.decision.device in ("cpu", "meta"):
            theirs.use_cpu = True
        else:
            self._set_rounding_variable()
        has_fused = self.decision.device not in ("xla", "meta")
        if not has_fused and self.optim == OptimizerNames.ADAMW_TORCH_FUSED:  # type: ignore[has-type]
            self.optim = OptimizerNames.ADAMW_TORCH  # the same updates
        super().__post_init__()  # type: ignore[misc]
        self._check_optimum()
        self.make_plan()
        self._warn_of_optimum(is_first=theirs.process_index == 0)

    @property
    def device(self) -> torch.device:
        """The device of tensors; the meta device in a dry run, which transformers does not know."""
        known = super().device  # type: ignore[misc]  # connects to the other ranks
        return known if self.decision.dry_run is None else torch.device("meta")

    # ---- ranks -------------------------------------------------------------------------------------------------------
    # transformers and TRL multiply batch sizes by `world_size` and choose samples by `process_index`. transformers sets
    # them to data-parallel size and rank itself where it knows of model parallelism (SageMaker's).
    @functools.cached_property
    def _mesh(self) -> Mesh:
        return self.make_plan().mesh

    @property
    def world_size(self) -> int:
        """The data-parallel size."""
        return self._mesh.size(self._mesh.data_axes)

    @property
    def process_index(self) -> int:
        """The data-parallel rank, which ranks with the same samples share."""
        return self._mesh.position(self._rank, self._mesh.data_axes)

    @property
    def _rank(self) -> int:
        dry_run = self.decision.dry_run
        return super().process_index if dry_run is None else dry_run.rank  # type: ignore[misc]

    @property
    def should_log(self) -> bool:
        """Whether this process logs: the main process, or with ``log_on_each_node`` the first of each machine."""
        each_node: bool = self.log_on_each_node  # type: ignore[attr-defined]
        return (self.local_process_index if each_node else self._rank) == 0  # type: ignore[attr-defined]

    @property
    def should_save(self) -> bool:
        """Whether this process saves: the main process, or with ``save_on_each_node`` the first of each machine."""
        each_node: bool = self.save_on_each_node  # type: ignore[attr-defined]
        return (self.local_process_index if each_node else self._rank) == 0  # type: ignore[attr-defined]

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """A context manager that the main process, or the first of each machine, enters first; the others enter when it
        has left. As in transformers, where processes wait only if ``world_size`` is above 1; on XLA ranks they wait on
        the host, and not on the device, in a graph that differs between ranks."""
        state: Any = self.distributed_state  # type: ignore[attr-defined]
        goes_first = state.is_local_main_process if local else state.is_main_process
        if not goes_first:
            state.wait_for_everyone()
        try:
            yield
        finally:
            if goes_first:
                state.wait_for_everyone()

    # ---- strategies and plan -----------------------------------------------------------------------------------------
    def strategies(self) -> list[StrategyPlugin]:
        """Returns the plugins that the arguments select.

        Raises:
            ConfigurationError: if the configuration file is invalid, or contains options of the Trainer.
        """
        from neuron_accel.strategies.fully_sharded import FullyShardedPlugin
        from neuron_accel.strategies.model_parallelism.plugin import ModelParallelismPlugin
        from neuron_accel.strategies.sequence_parallel.plugin import SequenceParallelPlugin
        from neuron_accel.strategies.zero1 import Zero1Plugin

        wanted: list[StrategyPlugin] = []
        if self.tensor_parallel_size > 1 or self.pipeline_parallel_size > 1:
            pipeline = {"num_microbatches": self.microbatches, "schedule": self.pipeline_parallel_schedule}
            wanted.append(
                ModelParallelismPlugin(
                    tensor_parallel_size=self.tensor_parallel_size,
                    pipeline_parallel_size=self.pipeline_parallel_size,
                    parallelize_embeddings=not self.disable_embedding_parallelization,
                    **(pipeline if self.pipeline_parallel_size > 1 else {}),  # type: ignore[arg-type]
                )
            )
        if self.tensor_parallel_size > 1 and not self.disable_sequence_parallel:
            wanted.append(SequenceParallelPlugin())
        if self.zero_1:
            wanted.append(Zero1Plugin(**self._zero_options()))
        if self.fully_sharded:
            wanted.append(FullyShardedPlugin(**self._zero_options()))
        wanted += self._reports()
        for plugin in self.plugins or ():
            wanted += [plugin] if isinstance(plugin, StrategyPlugin) else load_config({"plugins": [plugin]}).plugins
        if self.neuron_config is not None:
            wanted += self._configured(self.neuron_config)
        return wanted

    @property
    def microbatches(self) -> int:
        """Number of micro-batches into which a pipeline splits the batch of a rank."""
        given = self.pipeline_parallel_num_microbatches
        size: Any = self.per_device_train_batch_size  # a number, since `__post_init__`
        return size if given == -1 else given

    def make_plan(self) -> Plan:
        """Makes the plan of the strategies, and connects to the other ranks.

        Called when the arguments are constructed, so that errors are raised before a model is loaded.

        Raises:
            PlanError: if the strategies cannot run together, on this number of ranks, or with the other arguments.
        """
        registry = default_registry()
        self.device  # type: ignore[attr-defined]  # noqa: B018  # connects to the other ranks
        backend = connect(self.decision)
        if self.decision.backend == "xla":
            wait_on_host(backend)
        plan = make_plan(
            self.strategies(),
            world_size=backend.world_size,
            backend_capabilities=backend.capabilities,
            backend_missing=backend.missing,
            default_owners=registry.default_owners(),
            provenance=registry.provenance,
        )
        if plan.owners.get(Claim.BACKWARD) is not None:
            self._check_with_a_pipeline()
        return plan

    # ---- checks ------------------------------------------------------------------------------------------------------
    def _check_values(self) -> None:
        folder = str(getattr(self, "output_dir", None) or "")
        if is_url(folder):  # transformers would make a local folder of that name
            raise ConfigurationError(
                f"output_dir={folder!r} is not a local folder.",
                why="transformers writes logs and the state of the Trainer there, and deletes old checkpoints from it",
                fix="use a folder that all machines share; `trainer.accelerator.save_state(url)` saves to a URL",
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} is not possible.", fix="use 1 or more")
        if self.pipeline_parallel_num_microbatches < 1 and self.pipeline_parallel_num_microbatches != -1:
            raise ConfigurationError(
                f"pipeline_parallel_num_microbatches={self.pipeline_parallel_num_microbatches} is not possible.",
                fix="use 1 or more, or -1 for the per-device batch size",
            )
        if self.pipeline_parallel_size == 1:
            self._check_without_a_pipeline()
        for name, instead in _BYPASSES.items():
            if getattr(self, name, None):
                raise ConfigurationError(
                    f"{name!r} is not possible here.",
                    why="it would bypass the plugins' plan",
                    fix=f"use {instead} instead, or transformers' own Trainer",
                )

    def _check_without_a_pipeline(self) -> None:
        for name, default in (("pipeline_parallel_num_microbatches", -1), ("pipeline_parallel_schedule", "1f1b")):
            if getattr(self, name) != default:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)} has no effect without a pipeline.",
                    fix="leave it out, or set pipeline_parallel_size",
                )

    def _check_with_a_pipeline(self) -> None:
        size: Any = self.per_device_train_batch_size
        if self.pipeline_parallel_size > 1 and size % self.microbatches:
            raise PlanError(
                f"A batch of {size} samples cannot be split into {self.microbatches} micro-batches.",
                where="pipeline_parallel_num_microbatches, per_device_train_batch_size",
                fix="choose a number of micro-batches that divides the batch",
            )
        refused = {
            "fp16": "the pipeline runs backward passes before losses can be scaled; use bf16",
            "predict_with_generate": "a stage has the key/value cache of its own layers only; evaluate the loss, and "
            "generate with the saved model in one process",
        }
        for name, reason in refused.items():
            if getattr(self, name, False):
                raise PlanError(f"{name} is not possible in a pipeline.", why=reason)

    def _configured(self, path: str) -> list[StrategyPlugin]:
        configured = load_config(path)
        for option in [*configured.accelerate, *(["dataloader"] if configured.dataloader else [])]:
            instead = _OF_THE_TRAINER.get(option, "accelerator_config")
            raise ConfigurationError(
                f"{option!r} is not possible in a Trainer's configuration file.",
                where=path,
                why="the Trainer sets it from its own arguments",
                fix=f"leave it out and use the argument {instead}",
            )
        return list(configured.plugins)

    # ---- serialization -----------------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """As in transformers, with plugins as text."""
        data = super().to_dict()  # type: ignore[misc]
        if self.plugins is not None:
            data["plugins"] = [p if isinstance(p, str) else repr(p) for p in self.plugins]
        return data


@dataclass
class NeuronTrainingArguments(StrategyArguments, TrainingArguments):
    """transformers' ``TrainingArguments``, with the arguments of :class:`StrategyArguments`."""


@dataclass
class NeuronSeq2SeqTrainingArguments(StrategyArguments, Seq2SeqTrainingArguments):
    """transformers' ``Seq2SeqTrainingArguments``, with the arguments of :class:`StrategyArguments`."""
