# SPDX-License-Identifier: Apache-2.0
"""``NeuronAccelerator``: an ``accelerate.Accelerator`` whose ``prepare`` follows a plan of strategies."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

from neuron_accel.loop.accelerate import Accelerator  # isort: skip  # first: it chooses the device for Accelerate
import torch
from torch import nn

from neuron_accel.backends.select import DryRun, Machine, connect, settle
from neuron_accel.checkpoint.state.full_state import (
    Weights,
    full_gradients,
    full_optimizer_state,
    full_state_dict,
    is_of_transformers,
    save_configuration,
    without_ties,
)
from neuron_accel.checkpoint.state.resume import Resumed, SavedBatch, plan_of_last_checkpoint, say_batch, step_of
from neuron_accel.checkpoint.state.session import Session, Source
from neuron_accel.checkpoint.state.training import TrainingObjects
from neuron_accel.data.loaders import prepare_data_loader, skip_first_batches
from neuron_accel.data.position import samples_at_once
from neuron_accel.engine.plan.auto import choose_layout
from neuron_accel.engine.plan.config import RunConfig, load_config
from neuron_accel.engine.plan.mesh import AxisKind
from neuron_accel.engine.plan.plugin import Claim, StrategyPlugin
from neuron_accel.engine.plan.registry import default_registry
from neuron_accel.engine.runtime.preview import explain_memory, explain_parameters, preview
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.errors import UsageError
from neuron_accel.lazy import lazy_load_for_parallelism
from neuron_accel.loop import gather as values
from neuron_accel.loop import prepare
from neuron_accel.loop.arguments import (
    ACCELERATES,
    NOT_GIVEN,
    check_dry_precision,
    check_map_location,
    check_precision,
    checked_handlers,
    checked_plugins,
    merged_options,
    planned_training,
    timeout_of,
    warn_of_unused_precision,
    with_accumulation,
    with_ddp_options,
)
from neuron_accel.loop.deferred_values import call_after_step, numbers, progress_bar
from neuron_accel.loop.full_weights import full_weights
from neuron_accel.loop.gather import split_for_rank
from neuron_accel.loop.host_barrier import wait_on_host
from neuron_accel.loop.interruption import SIGNALS, Interruption
from neuron_accel.loop.join import even_batches_as, join_uneven_inputs
from neuron_accel.loop.methods import (
    collective,
    known_names_only,
    returns_false,
    returns_first_argument,
    returns_folder,
    returns_none,
    skipped,
    weakly,
)
from neuron_accel.loop.precompile_mode import (
    is_precompiling,
    precompile_plugins,
    without_value_checks,
)
from neuron_accel.loop.prepare import NoSync
from neuron_accel.loop.profiling import named_ranges
from neuron_accel.loop.start import begin, check_connected
from neuron_accel.loop.step import Step
from neuron_accel.loop.watchdog import watch
from neuron_accel.loop.wrappers import Owner, PreparedOptimizer, PreparedScheduler
from neuron_accel.neuron.environment import hardware_of_run
from neuron_accel.neuron.precision import lost_updates, set_precision_flags
from neuron_accel.neuron.profiling import profiling_problem, set_profiling_variables
from neuron_accel.storage import staged, upload_folder

if TYPE_CHECKING:
    from accelerate.state import GradientState
    from accelerate.tracking import GeneralTracker
    from accelerate.utils import (
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        DynamoBackend,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        KwargsHandler,
        LoggerType,
        MegatronLMPlugin,
        ParallelismConfig,
        PrecisionType,
        ProfileKwargs,
        ProjectConfiguration,
        RNGType,
        TorchDynamoPlugin,
        TorchTensorParallelPlugin,
    )

    from neuron_accel.backends.base import Backend
    from neuron_accel.engine.plan.plan import Plan
    from neuron_accel.engine.runtime.run import PreparedModel, Run


A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=nn.Module)
LoaderT = TypeVar("LoaderT", bound=torch.utils.data.DataLoader)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class NeuronAccelerator(Accelerator):
    """An ``accelerate.Accelerator`` that shards training over ranks as its strategy plugins define.

    Args:
        plugins: strategies, in any order: plugin objects, or mappings ``{name: options}`` as in a configuration.
            "auto", alone or among others, adds the layout that the search of neuron-accel-plan finds for these ranks.
        plan_for: of that search, what is known before ``prepare``: ``{"model": config, "global_batch": 64, "sequence":
            4096}``, with further keys of the package. Added to that of ``config``, which may name a layout instead.
        config: path of a YAML file, or a mapping, with ``plugins`` and Accelerate's options, which are added to the
            other arguments. An option may be given in one place only.
        zero_1: True adds ``Zero1Plugin()``.
        mp_plugin: a ``ModelParallelismPlugin``; the same as listing it in ``plugins``.
        backend: "torch", "xla", or "auto" to choose the one that the machine supports; a ``DryRun``, or "dryrun" with
            the number of ranks in the environment, to run as one rank of many without the others and without memory.
        kwargs_handlers: as in ``accelerate.Accelerator``. ``DistributedDataParallelKwargs`` set the options of the
            plugin that reduces gradients; an option without effect here raises an error.

    ``device_placement``, ``mixed_precision``, ``gradient_accumulation_steps``, ``cpu``, ``dataloader_config``,
    ``rng_types``, ``log_with``, ``project_dir``, ``project_config``, ``gradient_accumulation_plugin``,
    ``step_scheduler_with_optimizer``, ``dynamo_backend`` and ``dynamo_plugin`` are those of ``accelerate.Accelerator``,
    with its defaults. ``split_batches`` is ignored, as there. ``deepspeed_plugin``,
    ``deepspeed_plugins``, ``fsdp_plugin``, ``torch_tp_plugin``, ``megatron_lm_plugin`` and ``parallelism_config`` raise
    an error that names the alternative.

    Attributes:
        plan: the immutable plan that was made from the plugins; print it with ``print(accelerator.plan.explain())``.
        run: the state of the run, for plugins.
        is_precompiling: whether neuron_parallel_compile runs this process to collect graphs. Every value is zero then,
            and saving, loading, logging and checks of values do nothing.

    Raises:
        ConfigurationError: if an option is unknown, contradicts another, or is replaced by a plugin.
        PlanError: if the plugins cannot run together on this many ranks.
        DesyncError: on every rank, if ranks were configured differently.

    Example::

        accelerator = NeuronAccelerator(plugins=[ModelParallelismPlugin(tensor_parallel_size=2), Zero1Plugin()])
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    @known_names_only
    def __init__(
        self,
        *,
        plugins: Literal["auto"] | Sequence[StrategyPlugin | Mapping[str, Any] | Literal["auto"]] = (),
        plan_for: Mapping[str, Any] | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        zero_1: bool = False,
        mp_plugin: StrategyPlugin | None = None,
        backend: Literal["auto", "torch", "xla", "dryrun"] | DryRun | None = None,
        device_placement: bool = NOT_GIVEN,
        split_batches: bool = NOT_GIVEN,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = NOT_GIVEN,
        cpu: bool = NOT_GIVEN,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: MegatronLMPlugin | None = None,
        rng_types: list[str | RNGType] | None = None,
        log_with: str | LoggerType | GeneralTracker | list[str | LoggerType | GeneralTracker] | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = NOT_GIVEN,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in ACCELERATES}
        configured = load_config(config, searches=True) if config is not None else RunConfig()
        options = merged_options(configured, given, os.environ)
        training, listed = planned_training(plugins, plan_for, configured, has_config=config is not None)
        wanted = [*checked_plugins(listed, mp_plugin), *configured.plugins]
        handlers = options["kwargs_handlers"] = checked_handlers(kwargs_handlers)
        registry = default_registry()
        if zero_1:
            wanted.append(registry.switched_on("zero_1"))
        for plugin in wanted:
            registry.refuse_disabled(type(plugin))
        wanted = with_ddp_options(wanted, handlers, registry)
        check_precision(options.get("mixed_precision"))
        decision = settle(os.environ, requested=backend or configured.backend, cpu=bool(options.get("cpu")))
        options["cpu"] = decision.device in ("cpu", "meta")
        self._on_neuron = decision.device == "neuron" or (decision.backend == "xla" and Machine().xla_neuron)
        set_precision_flags(
            os.environ,
            mixed_precision=str(options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")),
            compiles_for_neuron=self._on_neuron and decision.backend == "xla",
        )
        if decision.device == "neuron":  # onto which transformers cannot load from several threads
            os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
        self._set_profiling_variables(handlers, decision.backend)
        self.is_precompiling = is_precompiling()
        was_connected = torch.distributed.is_available() and torch.distributed.is_initialized()
        super().__init__(**with_accumulation(options, os.environ))
        warn_of_unused_precision(self.mixed_precision, self.device.type)
        check_dry_precision(self.mixed_precision, decision.backend)
        ranks = connect(decision, timeout=timeout_of(handlers), adopts=not was_connected)
        if decision.dry_run is None:
            check_connected(ranks.world_size, self.state.num_processes)
            wait_on_host(ranks)
        self._hardware = hardware_of_run(os.environ, decision)
        if training is not None:
            wanted += self._chosen_plugins(training, ranks)
        if self.is_precompiling:
            wanted = precompile_plugins(wanted, self.gradient_accumulation_steps, os.environ)
        if decision.dry_run is not None:
            wanted = [*without_value_checks(wanted), *decision.dry_run.observers]
        self.run = begin(wanted, ranks, registry, self._hardware)
        self._steps_at_once = self.run.data_parallel_size
        self._needs_accumulate = False  # after `keep_batch` has raised the accumulation
        # Nothing that the accelerator holds holds the accelerator: it is freed with its last user, and its loaders too.
        self.run.backward_scale = partial(_backward_scale, self.scaler, self.gradient_state)
        self.run.log, self.run.is_precompiling = weakly(self._log_figures), self.is_precompiling
        self.run.has_trackers = weakly(self._has_trackers, False)
        self._step = Step(self.run, self.gradient_state)
        self._session = Session(self._source())
        self._watchdog = watch(self.run)
        self._interruptions: list[Interruption] = []
        for setup in self.run.hooks["setup"]:
            setup(self.run)

    def _chosen_plugins(self, training: Mapping[str, Any], ranks: Backend) -> tuple[StrategyPlugin, ...]:
        """The layout of ``plugins="auto"``, of which a step may have several micro-batches."""
        steps, recorded = self.gradient_accumulation_steps, partial(plan_of_last_checkpoint, self.project_dir)
        chosen = load_config(choose_layout(training, ranks, self._hardware, accumulation=steps, recorded=recorded))
        self.gradient_accumulation_steps = chosen.accelerate.get("gradient_accumulation_steps", 1)
        return chosen.plugins

    def __repr__(self) -> str:
        if not hasattr(self, "run"):
            return f"<{type(self).__name__}, under construction>"
        backend, names = self.run.backend, ", ".join(plugin.spec.name for plugin in self.plan.plugins)
        return (
            f"<{type(self).__name__}: {self.plan.mesh}; plugins: {names or 'none'}; "
            f"rank {backend.rank} of {backend.world_size} on {backend.device}, backend {backend.name!r}>"
        )

    # ---- the run -----------------------------------------------------------------------------------------------------
    @property
    def plan(self) -> Plan:
        return self.run.plan

    @property
    def device(self) -> torch.device:
        """The device of tensors; the meta device in a dry run, which Accelerate does not know."""
        known = self.state.device
        return self.run.device if hasattr(self, "run") and not self.run.backend.has_values else known

    @property
    def num_processes(self) -> int:
        """The data-parallel size, by which training loops multiply batch sizes and schedules.

        It equals the number of processes unless a plugin gives several ranks the same data, as tensor parallelism does.
        The number of processes is :attr:`world_size`, and also ``accelerator.state.num_processes`` and
        ``AcceleratorState().num_processes``. The index to this number is :attr:`process_index`.
        """
        known = self.state.num_processes  # raises, as Accelerate's does, if its state was reset
        return self.run.data_parallel_size if hasattr(self, "run") else known

    @property
    def process_index(self) -> int:
        """The data-parallel rank: the index that belongs to :attr:`num_processes`, by which training loops choose
        samples and seeds.

        Ranks with the same samples have the same one; in names of files that each process writes use
        ``accelerator.state.process_index``, the index of the process. ``is_main_process`` is True on one process.
        """
        known = self.state.process_index
        return self.run.data_parallel_rank if hasattr(self, "run") else known

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.run.backend.world_size

    @property
    def is_last_process(self) -> bool:
        return self.state.is_last_process

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks or groups of ranks that process different samples."""
        return self.run.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's samples among those of all data-parallel ranks, from 0."""
        return self.run.data_parallel_rank

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks with different shards of the same parameters (axes of kind ``MODEL``)."""
        return self._size(AxisKind.MODEL)

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this rank along the axes of kind ``MODEL``, from 0."""
        return self._rank(AxisKind.MODEL)

    @property
    def pipeline_parallel_size(self) -> int:
        """Number of ranks with other layers (axes of kind ``STAGE``)."""
        return self._size(AxisKind.STAGE)

    @property
    def pipeline_parallel_rank(self) -> int:
        """Index of this rank along the axes of kind ``STAGE``, from 0."""
        return self._rank(AxisKind.STAGE)

    @property
    def context_parallel_size(self) -> int:
        """Number of ranks with other positions of the same samples (axes of kind ``SEQUENCE``)."""
        return self._size(AxisKind.SEQUENCE)

    @property
    def context_parallel_rank(self) -> int:
        """Index of this rank along the axes of kind ``SEQUENCE``, from 0."""
        return self._rank(AxisKind.SEQUENCE)

    def _size(self, kind: AxisKind) -> int:
        mesh = self.plan.mesh
        return mesh.size(mesh.names(kind))

    def _rank(self, kind: AxisKind) -> int:
        mesh = self.plan.mesh
        return mesh.position(self.run.backend.rank, mesh.names(kind))

    @contextmanager
    def model_init(self) -> Iterator[None]:
        """A context manager in which models are built: without memory for weights of which plugins keep a part on each
        rank (:func:`~neuron_accel.lazy_load_for_parallelism`)."""
        axes = [plugin.axes() for plugin in self.plan.plugins if plugin.spec.lazy_load]
        lazy = self.run.world.size > 1 and any(not each or any(axis.degree > 1 for axis in each) for each in axes)
        with lazy_load_for_parallelism() if lazy else nullcontext():
            yield

    def explain(self, model: nn.Module, *, tokens: int | None = None) -> str:
        """Describes how every parameter of a model is sharded on this rank, by which rule, and what its modules send.

        For a model that is not prepared yet, describes what `prepare` would do to it. Not collective. On an instance,
        or for one (NEURON_ACCEL_INSTANCE), also compares what training takes at least with the memory of a core.

        Args:
            model: a model, prepared or not.
            tokens: number of tokens that this rank processes in a step. If given, traffic is printed in bytes per step,
                else in bytes per token.

        Returns:
            the description, as text.

        Raises:
            NeuronAccelError: for a model that is not prepared, the error that `prepare` would raise.
        """
        prepared, run = self.run.prepared(model), self.run
        if prepared is None:
            prepared, run = preview(model, self.run)
        text = explain_parameters(prepared, run, tokens=tokens)
        memory = "" if self._hardware is None else explain_memory(prepared, run, self._hardware)
        return f"{text}\n\n{memory}" if memory else text

    # ---- prepare -----------------------------------------------------------------------------------------------------
    @overload
    def prepare(self, a: A, /, *, device_placement: list[bool] | None = None) -> A: ...
    @overload
    def prepare(self, a: A, b: B, /, *, device_placement: list[bool] | None = None) -> tuple[A, B]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, /, *, device_placement: list[bool] | None = None) -> tuple[A, B, C]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, /, *, device_placement: list[bool] | None = None
    ) -> tuple[A, B, C, D]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, /, *, device_placement: list[bool] | None = None
    ) -> tuple[A, B, C, D, E]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, f: F, /, *, device_placement: list[bool] | None = None
    ) -> tuple[A, B, C, D, E, F]: ...
    @overload
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any: ...
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares models, loaders, optimizers and schedulers, given in any order; returns them in the order given.

        The types that a type checker sees do not change. As in Accelerate, optimizers and schedulers are wrapped:
        methods that a class has in addition to those of ``torch.optim.Optimizer`` or ``LRScheduler`` are found on
        ``optimizer.optimizer`` and ``scheduler.scheduler``. Those of an optimizer are collective if a plugin shards it.

        Args:
            args: the objects; those of another type are returned unchanged.
            device_placement: for each object, whether it is moved to the device; None: as the accelerator was set up.

        Raises:
            UsageError: if another accelerator has prepared a model and plugins have sharded it.
            ParameterError: if an optimizer holds a parameter that belongs to no prepared model.
        """
        if not args:
            raise UsageError(
                "`prepare` was called without arguments.",
                fix="model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )
        placements: Sequence[bool | None] = device_placement or [None] * len(args)
        if len(placements) != len(args):
            raise UsageError(f"device_placement has {len(placements)} entries for {len(args)} objects.")
        for model in (a for a in args if isinstance(a, nn.Module)):
            self._check_new(model)
        result = list(args)
        prepare_model: Callable[..., Any] = self.prepare_model
        overridden = type(self).prepare_model is not NeuronAccelerator.prepare_model
        if any(isinstance(value, torch.optim.Optimizer) for value in args) and not overridden:
            prepare_model = partial(self._prepare_model, with_optimizer=True)
        in_order: list[tuple[type, Callable[..., Any]]] = [
            (nn.Module, prepare_model),
            (torch.utils.data.DataLoader, self.prepare_data_loader),
            (torch.optim.Optimizer, self.prepare_optimizer),
        ]
        for kind, prepare_one in in_order:
            for i, (value, placement) in enumerate(zip(args, placements, strict=True)):
                if isinstance(value, kind):
                    result[i] = prepare_one(value, device_placement=placement)
        prepare.finish(self.run)
        for i, value in enumerate(args):
            if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
                result[i] = self.prepare_scheduler(value)
        return tuple(result) if len(result) > 1 else result[0]

    def _check_new(self, model: nn.Module) -> None:
        """Releases a model from another accelerator that prepared it, which is possible if no plugin sharded it."""
        if not getattr(model, "_is_accelerate_prepared", False):
            return
        owner = _owner_of(model)
        if owner.accelerator is self:
            return
        if owner.run is not None:
            _release(owner.run, owner.accelerator)
        if getattr(model, "_is_accelerate_prepared", False):
            raise UsageError(
                f"This {type(model).__name__} was prepared before, by another accelerator.",
                why="its layers would be sharded, and its gradients summed, a second time",
                fix="use the model that the first `prepare` returned; for a new run, build a new model, and load the "
                "weights that `save_state` or `save_pretrained` wrote",
            )

    def prepare_model(
        self, model: ModelT, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> ModelT:
        """Lets the plugins rewrite a model and moves it to its device. Collective.

        Args:
            model: the model. One that this accelerator has prepared before is returned unchanged.
            device_placement: whether to move it; None: as the accelerator was set up.
            evaluation_mode: True for a model that is not trained: its gradients are not reduced.

        Returns:
            the prepared model; the same object, unless a plugin or Accelerate wraps it.

        Raises:
            UsageError: if another accelerator has prepared the model for training and plugins have sharded it.
        """
        return self._prepare_model(model, device_placement, evaluation_mode)

    def _prepare_model(
        self,
        model: ModelT,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        with_optimizer: bool = False,
    ) -> ModelT:
        if _owner_of(model).accelerator is self and (known := self.run.prepared(model)) is not None:
            return cast(ModelT, known.module) if model is known.original else model
        if not evaluation_mode:
            self._check_new(model)
        if getattr(model, "_is_accelerate_prepared", False):
            return super().prepare_model(model, device_placement, evaluation_mode)
        placed = self.device_placement if device_placement is None else device_placement
        # In "evaluation mode" Accelerate casts and compiles the model, and does not wrap it in DistributedDataParallel.
        wrap = partial(super().prepare_model, device_placement=False, evaluation_mode=True)
        record = prepare.prepare_model(
            model,
            self.run,
            device=self.device if placed else None,
            wrap=wrap,
            load=self._session.adopt,
            training=not evaluation_mode,
            with_optimizer=with_optimizer,
        )
        if self.run.backend.is_lazy and not evaluation_mode:
            record.handles.append(record.module.register_forward_pre_hook(weakly(self._finish_micro_batch)))
        self._models[-1] = record.module
        for each in (model, record.module):
            each._neuron_accel_owner = Owner(self)  # type: ignore[assignment]  # torch: Tensor | Module
        return cast(ModelT, record.module)

    def prepare_data_loader(
        self,
        data_loader: LoaderT,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> LoaderT:
        """Shards a loader over the data-parallel ranks and lets the plugins transform it."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepared = prepare_data_loader(
            data_loader,
            self.run,
            dispatch_batches=self.dispatch_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            split_batches=self.split_batches,
            rng_types=self.rng_types.copy() if self.rng_types else self.rng_types,
            even_batches=self.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        prepared = self.run.hooks.transform("transform_dataloader", prepared, self.run)
        prepared._is_accelerate_prepared = True
        self._dataloaders.append(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: OptimizerT, device_placement: bool | None = None) -> OptimizerT:
        """Rebinds an optimizer to the rewritten parameters and lets the plugins transform it.

        Raises:
            ParameterError: if it holds a parameter that belongs to no prepared model, on several ranks.
        """
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        transformed = prepare.prepare_optimizer(optimizer, self.run, number=len(self._optimizers))
        if self._on_neuron:
            self._warn_of_lost_updates(transformed)
        prepared: Any = PreparedOptimizer(
            transformed,
            self.run,
            self.scaler,
            given=optimizer,
            gradients_complete=self._step.items.divide_gradients,
        )
        prepared._is_accelerate_prepared = True
        self.run.add_optimizer(prepared)
        self._optimizers.append(prepared)
        self._drop_retired()
        return prepared

    def _drop_retired(self) -> None:
        """Drops the optimizers whose parameters a later one has, with their schedulers: checkpoints leave them out."""
        retired = [each for each in self._optimizers if getattr(each.optimizer, "retired", False)]
        for each in retired:
            if each.lazy is not None:
                each.lazy.close()
                each.lazy = None
            self._optimizers.remove(each)
        self._schedulers[:] = [
            each for each in self._schedulers if not each.optimizers or any(o not in retired for o in each.optimizers)
        ]

    def _warn_of_lost_updates(self, optimizer: torch.optim.Optimizer) -> None:
        low = any(p.dtype == torch.bfloat16 for group in optimizer.param_groups for p in group["params"])
        masters = self.run.owner(Claim.OPTIMIZER_STATE) is not None
        autocast = self.mixed_precision == "bf16"
        said = lost_updates(os.environ, low_precision=low, masters=masters, autocast=autocast)
        if said is not None:
            warnings.warn(said, stacklevel=4)

    def prepare_scheduler(self, scheduler: T) -> T:
        """Wraps a scheduler such that each step of its optimizer advances it by ``data_parallel_size`` steps."""
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        mine = [o for o in self._optimizers if _wraps(o, getattr(scheduler, "optimizer", None))]
        prepared = PreparedScheduler(
            scheduler,
            mine or self._optimizers,
            self.run,
            accumulating=weakly(self._is_accumulating, False),
            steps_at_once=self._steps_at_once,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        prepared._is_accelerate_prepared = True
        self._schedulers.append(prepared)
        return prepared

    # ---- a step ------------------------------------------------------------------------------------------------------
    def _is_accumulating(self) -> bool:
        return self._step.is_accumulating

    def _finish_micro_batch(self, *_: Any) -> None:
        self._step.finish_micro_batch()

    def backward(self, loss: torch.Tensor, *, num_items: int | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Runs the backward pass and, on the last micro-batch of a step, reduces the gradients.

        Args:
            loss: the loss of this micro-batch on this rank, 0-dim.
            num_items: number of items (for example, label tokens) that ``loss`` is the mean of: a mean, not a sum and
                not a mean that was multiplied by them. If given, the gradients of the step are those of the mean over
                all items of all ranks and micro-batches, even if these have different numbers of items; if not, those
                of the mean over micro-batches, as in Accelerate. Give it for every loss of a step, or for none.
            kwargs: passed on to ``loss.backward``.

        Raises:
            UsageError: if ``num_items`` is given and a plugin runs the backward pass itself, or ``loss`` is a sum of
                torch's loss functions; for ``create_graph`` on several data-parallel ranks.
        """
        if kwargs.get("create_graph") and self.run.data_parallel_size > 1:
            raise UsageError(
                "`create_graph` is not possible on several data-parallel ranks.",
                where="accelerator.backward",
                why="gradients of all ranks are summed, and the sum has no graph to differentiate",
                fix="compute the penalty by torch.autograd.grad(..., create_graph=True), and add it to the loss",
            )
        if self._needs_accumulate and not self._step.is_accumulating:
            raise UsageError(
                "`load_state(keep_batch=True)` has no effect outside `accelerator.accumulate(model)`.",
                where="accelerator.backward",
                why=f"a step has {self.gradient_accumulation_steps} micro-batches now, and as many samples as before",
                fix="run each micro-batch in `with accelerator.accumulate(model):`",
            )
        plain = self.scaler is None and self.gradient_accumulation_steps == 1 and not kwargs
        accelerates = super().backward

        def differentiate(loss: torch.Tensor) -> None:
            loss.backward() if plain else accelerates(loss, **kwargs)  # Accelerate would divide by 1

        self._step.backward(loss, num_items, differentiate, self.gradient_accumulation_steps, kwargs)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """A context manager for one micro-batch: gradients accumulate, and are reduced in the last one of a step."""
        with self._step.micro_batch(), super().accumulate(*models):
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A context manager that disables gradient reduction for the backward passes of forward passes run in it."""
        record = self.run.prepared(model)
        with super().no_sync(model) if record is None else NoSync(record)():
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:  # type: ignore[override]
        """A context manager whose backward pass reduces gradients although the forward pass ran in ``no_sync``."""
        record = self.run.prepared(model)
        if record is None:
            yield
            return
        previous, record.synchronises = record.synchronises, True
        try:
            yield
        finally:
            record.synchronises = previous

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A context manager for training loops in which ranks have different numbers of batches, as torch's ``Join``.

        A rank that has run out of batches takes part in the backward passes, clipping, optimizer and scheduler steps of
        the others without data, so that all ranks leave the context with equal weights and optimizer states. Gradients
        are divided by the number of all ranks throughout.

        Args:
            joinables: the prepared models (and optimizers).
            even_batches: overrides the accelerator's ``even_batches`` for map-style loaders. With even batches the
                context does nothing.

        Raises:
            UsageError: on every rank, if a collective such as `gather` or `reduce` is called in the context after a
                rank has run out of batches.
        """
        if not all(self._is_mine(joinable) for joinable in joinables):
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        enabled = not (self.even_batches if even_batches is None else even_batches) and self.world_size > 1
        joined = join_uneven_inputs(self.run) if enabled else nullcontext()
        with even_batches_as(even_batches, self._dataloaders), joined:
            yield

    def _is_mine(self, value: Any) -> bool:
        return self.run.prepared(value) is not None or any(value is optimizer for optimizer in self._optimizers)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clips the gradients of a step to a global norm, over all shards on all ranks. Collective.

        Args:
            parameters: the parameters whose gradients are clipped; those from before `prepare` are accepted too.
            max_norm: the norm to clip to.
            norm_type: the p of the p-norm; can be ``inf``.

        Returns:
            the norm before clipping, 0-dim. NaN while gradients accumulate, when nothing is clipped.
        """
        parameters = self._parameters(parameters)
        if not self.sync_gradients:
            return torch.full((), float("nan"), device=self.device)
        owner = self.run.owner(Claim.GRADIENT_REDUCTION)
        # If the list is empty, its parameters may be on other ranks, which call the collective.
        if owner is None or (parameters and all(self.run.find_parameter(p) is None for p in parameters)):
            return super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        self.unscale_gradients()
        self._step.items.divide_gradients()
        return self._step.clipping.norm(parameters, float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps the gradients of a step to [-clip_value, clip_value]; does nothing while gradients accumulate."""
        parameters = self._parameters(parameters)
        if not self.sync_gradients:
            return
        owner = self.run.owner(Claim.GRADIENT_REDUCTION)
        if owner is None or (parameters and all(self.run.find_parameter(p) is None for p in parameters)):
            super().clip_grad_value_(parameters, clip_value)
            return
        self.unscale_gradients()
        self._step.items.divide_gradients()
        self._step.clipping.value(parameters, float(clip_value))

    def _parameters(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[nn.Parameter]:
        """The current parameters, for a list that may contain those from before `prepare`."""
        given: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        records = [self.run.find_parameter(p) for p in given]
        trained = [p if r is None else r.current for p, r in zip(given, records, strict=True)]
        return [p for p in trained if p is not None]

    # ---- values of several ranks -------------------------------------------------------------------------------------
    @property
    def _shares_data(self) -> bool:
        return self.data_parallel_size < self.world_size

    @property
    def _own_exchange(self) -> bool:
        """Whether collectives use the run's backend instead of Accelerate's: if several ranks have the same data, which
        Accelerate does not support, on lazy devices, where Accelerate's would split the graph of a step in two, and in
        a dry run, of whose ranks Accelerate knows one."""
        return self._shares_data or self.run.backend.is_lazy or not self.run.backend.has_values

    @collective
    def gather(self, tensor: T) -> T:
        """Concatenates tensors of the data-parallel ranks along the first dim. Collective.

        Args:
            tensor: a tensor, or nested lists, tuples and dicts of tensors, of the same shape on every rank.

        Returns:
            the same structure; a tensor of shape ``[n, ...]`` becomes ``[n * data_parallel_size, ...]``, a 0-dim tensor
            ``[data_parallel_size]``.

        Raises:
            UsageError: on every rank, if shapes differ, where loaders may end with uneven batches.
        """
        self.run.join.collective_only("`gather`")
        sampler = getattr(self.gradient_state.active_dataloader, "batch_sampler", None)
        if not getattr(sampler, "even_batches", self.even_batches) and self.data_parallel_size > 1:
            values.check_shapes(tensor, self.run)
        return values.gather(tensor, self.run) if self._own_exchange else super().gather(tensor)

    @overload
    def gather_for_metrics(
        self, input_data: torch.Tensor, use_gather_object: Literal[False] = False
    ) -> torch.Tensor: ...
    @overload
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any: ...
    @collective
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers over the data-parallel ranks and drops the samples that were repeated to fill the last batch.

        Collective. A lazy device first executes the operations it has recorded: while training, call this after the
        optimizer's step.

        Args:
            input_data: tensors as for :meth:`gather`, or any objects.
            use_gather_object: whether to pickle the values even if they are tensors.
        """
        left_over = getattr(self.gradient_state.active_dataloader, "left_over", None)
        if not self._own_exchange and left_over is None:
            self.run.join.collective_only("`gather_for_metrics`")
            return super().gather_for_metrics(input_data, use_gather_object)
        if use_gather_object or not values.are_tensors(input_data):
            self.run.join.collective_only("`gather_for_metrics`")
            data = values.gather_objects(input_data, self.run)
        else:
            data = self.gather(input_data)
            self.run.backend.step_boundary()
        if left_over is not None:
            return values.without_repeats(data, left_over)
        end = self.gradient_state.end_of_dataloader
        lazy = self.run.backend.is_lazy
        return values.without_repeats(data, self.gradient_state.remainder, on_host=lazy) if end else data

    @collective
    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Reduces tensors over the data-parallel ranks. Collective.

        Args:
            tensor: a tensor, or nested lists, tuples and dicts of tensors, of the same shape on every rank.
            reduction: "sum", "mean", "max" or "none".
            scale: multiplies the result.
        """
        self.run.join.collective_only("`reduce`")
        return values.reduce(tensor, self.run, reduction, scale)

    @skipped(returns_first_argument, without_values=False)
    @collective
    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pads tensors to the largest size along ``dim`` of any rank, with ``pad_index``. Collective."""
        self.run.join.collective_only("`pad_across_processes`")
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    @collective
    def wait_for_everyone(self) -> None:
        """Returns once every process has called it."""
        self.run.join.collective_only("`wait_for_everyone`")
        if self.run.backend.is_lazy:
            self.run.backend.barrier()
        else:
            super().wait_for_everyone()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """A context manager that the main process enters first; the others enter when it has left."""
        with self._first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """A context manager that the first process of each machine enters first; the others enter when it has left."""
        with self._first(self.is_local_main_process):
            yield

    @contextmanager
    def _first(self, goes_first: bool) -> Iterator[None]:
        # Accelerate's barrier is on the device, in a graph that differs between ranks.
        if not goes_first:
            self.wait_for_everyone()
        yield
        if goes_first:
            self.wait_for_everyone()

    @skipped(returns_false, without_values=False)
    @collective
    def check_trigger(self) -> bool:
        """Whether any process has called ``set_trigger`` since this last returned True. Collective; the result is the
        same on every process."""
        self.run.join.collective_only("`check_trigger`")
        fired = values.any_rank(self.flag_tensor is not None and bool(self.flag_tensor), self.run)
        if fired:
            self.flag_tensor = torch.tensor(0, device=self.device)
        return fired

    @collective
    def watch_for_interruption(
        self,
        signals: Sequence[str] = SIGNALS,
        *,
        notice_file: str | os.PathLike[str] | None = None,
    ) -> Interruption:
        """Lets a training loop save and end when the run is asked to stop, after the same step on every rank::

            interruption = accelerator.watch_for_interruption()
            for batch in loader:
                ...
                if interruption.requested():
                    accelerator.save_state("checkpoints/last")
                    break

        Collective. From here on the signals no longer end a rank: ``requested()`` has to be called after each step. A
        second SIGINT interrupts at once. `end_training` restores the handlers.

        Args:
            signals: names of signals to any rank that ask to stop.
            notice_file: a file whose existence, on the machine of any rank, asks to stop.

        Raises:
            ConfigurationError: if a signal does not exist or cannot be handled.
            UsageError: in a thread other than the main one, unless ``signals`` is empty.
        """
        interruption = Interruption(
            self.run, signals=signals, notice_file=notice_file, counts=lambda: self.sync_gradients
        )
        self._interruptions.append(interruption)
        return interruption

    # ---- deferred values ---------------------------------------------------------------------------------------------
    def log(self, values: dict, step: int | None = None, log_kwargs: dict | None = None) -> None:
        """Logs to every tracker.

        Values may be tensors. On a lazy device they are read once the graph of the step has been executed, so that
        logging neither splits the graph nor waits for the device.
        """
        # When precompiling, the values are kept as well: they are outputs of the graph.
        write = returns_none if self.is_precompiling or not self.run.backend.has_values else super().log
        here = self.is_main_process
        call_after_step(values, self.run.backend, lambda now: write(numbers(now), step, log_kwargs or {}), here=here)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """A context manager that profiles what is done in it, as in Accelerate; yields torch's profiler.

        The profile has ranges for the parts of a step, for collectives, for passes of a pipeline, and for the hooks of
        strategies, under their names. On the XLA path of Neuron the runtime records the device's profile from its start
        on, for neuron-profile and Neuron Explorer, if a ``ProfileKwargs`` is among the ``kwargs_handlers`` of the
        accelerator, which then sets the variables for it.

        Args:
            profile_handler: options of the profile; None: the ``ProfileKwargs`` of ``kwargs_handlers``, or defaults.
        """
        from accelerate.utils import ProfileKwargs

        said = profiling_problem(os.environ, native=self.run.backend.name != "xla") if self._on_neuron else None
        if said is not None:
            warnings.warn(said, stacklevel=3)
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with named_ranges(self.run), handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:  # as in Accelerate, but one file for each process
            os.makedirs(handler.output_trace_dir, exist_ok=True)
            name = f"profile_{self.state.process_index}.json"
            profiler.export_chrome_trace(os.path.join(handler.output_trace_dir, name))
            self.wait_for_everyone()

    def _set_profiling_variables(self, handlers: Iterable[KwargsHandler] | None, backend: str) -> None:
        """Lets the Neuron runtime, which starts next, record profiles if the caller is going to make some."""
        from accelerate.utils import ProfileKwargs

        found = next((each for each in handlers or () if isinstance(each, ProfileKwargs)), None)
        if found is not None and self._on_neuron and backend == "xla":
            set_profiling_variables(os.environ, found.output_trace_dir)

    def _has_trackers(self) -> bool:
        return bool(self.trackers) and self.is_main_process

    def _log_figures(self, values: Mapping[str, float], step: int) -> None:
        """Logs figures that a plugin has measured to the trackers."""
        if self.is_main_process:
            super().log(dict(values), step)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints once on each machine. Tensors among ``args`` are read after the step, as by :meth:`log`; one that is
        formatted in an f-string is read at once."""
        write = super().print
        call_after_step(args, self.run.backend, lambda now: write(*now, **kwargs), here=self.is_local_main_process)

    def progress(self, iterable: Iterable[Any] | None = None, **options: Any) -> Any:
        """A tqdm progress bar, shown once on each machine, whose ``set_postfix`` takes tensors, as :meth:`log` does.

        Args:
            iterable: what to iterate over; None for a bar that is advanced with ``update``.
            options: arguments of ``tqdm``.
        """
        return progress_bar(self.run.backend, self.is_local_main_process, iterable, options)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """A context manager that yields this data-parallel rank's slice of inputs that every rank has.

        Args:
            inputs: a list, tuple, tensor (sliced along its first dim), dataset, or dict of these.
            apply_padding: whether to repeat the last item until slices are equally long.
        """
        yield split_for_rank(inputs, self.data_parallel_rank, self.data_parallel_size, pad=apply_padding)

    def skip_first_batches(self, dataloader: T, num_batches: int = 0) -> T:
        """A prepared loader without its first batches, such as resuming in the middle of an epoch needs.

        Args:
            dataloader: a prepared loader.
            num_batches: number of batches to skip.

        Returns:
            the new loader, which is prepared already.
        """
        if hasattr(dataloader, "forget_position"):  # that `load_state` set; the caller skips batches instead
            dataloader.forget_position()
        return skip_first_batches(dataloader, num_batches, self.run)

    # ---- state -------------------------------------------------------------------------------------------------------
    @collective
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The state dict of the original model: original names and shapes, on CPU. Collective.

        If no parameter is sharded, every process gets it; otherwise the main process does, and the others get an empty
        dict.
        """
        record = self.run.prepared(model)
        if record is None:
            return super().get_state_dict(model, unwrap)
        self.run.shared_inputs.compare()
        return full_state_dict(record, self.run)

    @collective
    def get_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of a prepared optimizer in full, on the CPU of every process. Collective.

        It has the form of ``optimizer.state_dict()``, with the names of the original parameters instead of numbers.
        ``optimizer.load_state_dict`` loads it on any number of processes, and so does torch's own in one.
        """
        return full_optimizer_state(getattr(optimizer, "optimizer", optimizer), self.run)

    @contextmanager
    def full_weights(self, model: nn.Module) -> Iterator[None]:
        """Context in which the parameters of ``model`` have their values, which may be read and written in place, on
        every rank: for an average of the weights, clipping, loading. Collective.

        Fully sharded parameters are gathered: all of them are in memory at once. What the loop writes must be the same
        on every data-parallel rank. Under tensor parallelism a parameter is this rank's shard, in a pipeline it is one
        of this rank's stage. The model may be called, but not stepped. Other strategies keep weights where they can be
        written at any time, and the context changes nothing.

        Args:
            model: a prepared model, or a module inside it.

        Raises:
            UsageError: if it is not prepared, or a plugin keeps weights that cannot be written, as fully sharded
                parameters on XLA ranks.
        """
        with self.run.events.open("full_weights", "call"), full_weights(model, self.run):
            yield

    @collective
    def get_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The reduced gradients of the last step by FQN, in the original shapes, on CPU on every process. Collective.

        For tests and debugging: all unsharded gradients are in memory at once.

        Raises:
            UsageError: if this accelerator did not prepare the model.
        """
        record = self.run.prepared(model)
        if record is None:
            raise UsageError("This model was not prepared by this accelerator.")
        self._step.items.divide_gradients()
        return full_gradients(record, self.run)

    @skipped(returns_none)
    @collective
    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes the full model with original names and shapes. Collective; returns once the files are complete.

        A model of transformers is written as its own ``save_pretrained`` writes it: with its configuration, and weights
        under the names of published models (the experts of a mixture one by one, and not stacked), so that
        ``from_pretrained`` and servers load the folder.

        Args:
            model: a prepared model.
            save_directory: the folder, or a URL such as "s3://bucket/model"; the main process then needs space for the
                files in its temporary folder.
            max_shard_size: largest size of a file, such as "5GB".
            safe_serialization: whether to write safetensors, with a tied weight under its first name only; False for
                ``torch.save``, with a tied weight under each of its names, and names as in memory.
        """
        with staged(save_directory) as folder:
            record = self.run.prepared(model)
            original: Any = self.unwrap_model(model) if record is None else record.original
            state = None if record is None else self.get_state_dict(model)
            if state is not None and safe_serialization:
                state = without_ties(state)
            adapted = getattr(original, "_hf_peft_config_loaded", False)  # save_pretrained would write adapters only
            if safe_serialization and is_of_transformers(original) and not adapted:
                write = partial(type(original).save_pretrained, original, folder, max_shard_size=max_shard_size)
                agreed(self.run, lambda: write(state_dict=state) if self.is_main_process else None)
            else:
                saved = model if state is None else Weights(state)
                super().save_model(saved, os.fspath(folder), max_shard_size, safe_serialization)
                if self.is_main_process:
                    save_configuration(original, folder)
            agreed(self.run, lambda: upload_folder(folder, save_directory) if self.is_main_process else None)
        self.wait_for_everyone()

    @skipped(returns_folder)
    @collective
    @known_names_only
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool = False,
        tokenizer: Any = None,
        check_equal: bool = True,
    ) -> str:
        """Saves models, optimizers, schedulers, loaders, random states and registered objects. Collective.

        The checkpoint can be loaded on any mesh.

        Args:
            output_dir: the folder, or a URL such as "s3://bucket/runs/state"; a checkpoint in it stays valid until the
                new one is complete. None with automatic checkpoint naming.
            safe_serialization: accepted as in Accelerate; False only warns, once, since nothing is pickled.
            async_save: whether to return once everything is copied to host memory. The next save or load and
                `end_training` wait until it is written, and raise the error if that failed.
            tokenizer: a tokenizer to save beside the model's configuration; any object with ``save_pretrained``.
            check_equal: whether to check that replicated tensors, which one rank writes, are equal on all data-parallel
                ranks; reads all of them once.

        Returns:
            the folder; empty if nothing was saved.

        Raises:
            CheckpointError: on every rank, if something cannot be saved or written. An earlier checkpoint in the folder
                is left intact.
        """
        self.run.shared_inputs.compare()
        return self._session.save(
            output_dir,
            safe_serialization=safe_serialization,
            async_save=async_save,
            tokenizer=tokenizer,
            check_equal=check_equal,
        )

    @skipped(lambda *_, **__: Resumed())
    @collective
    @known_names_only
    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        resume: Literal["latest"] | None = None,
        verify: bool = True,
        map_location: Literal["cpu", "on_device"] | None = None,
        keep_batch: bool = False,
    ) -> Resumed:
        """Loads a checkpoint of :meth:`save_state`, saved on any mesh, or a folder of transformers' weights.

        Collective. Prepared loaders continue in the middle of their epoch, with the next batch. With
        ``resume="latest"`` one line at the beginning of a script makes every start of it continue where the one before
        stopped, and does nothing at the first; the main process prints which of the two happens.

        Args:
            input_dir: the folder or URL; None with automatic checkpoint naming, for the latest complete checkpoint.
            load_kwargs: must be empty: nothing is unpickled.
            resume: "latest" to load the latest complete checkpoint if there is one: with automatic checkpoint naming
                the one of the project folder with the highest number; else, of ``input_dir`` or the project folder, the
                folders in it and those in its folder ``checkpoints``, the one that was saved last.
            verify: whether to compare every file with its checksum first.
            map_location: None, "cpu" or "on_device", accepted as in Accelerate; every tensor is loaded to the device of
                its parameter.
            keep_batch: whether an optimizer step has as many samples as in the run that saved, and advances schedules
                as far, on whatever number of ranks: `gradient_accumulation_steps` follows from the checkpoint and the
                batch size of the first prepared loader. The loop has to use `accumulate`. Only the last step of an
                epoch may differ, to which `even_batches` adds samples.

        Returns:
            what was loaded; false in a condition if there was nothing, which happens only with ``resume``.

        Raises:
            CheckpointError: on every rank, before anything is changed.
            ConfigurationError: if these ranks cannot share the samples of a step.
        """
        check_map_location(map_location)
        if load_kwargs:
            raise UsageError("`load_kwargs` are arguments for unpickling, and nothing is unpickled here.")
        kept: list[SavedBatch] = []

        def keep(saved: SavedBatch) -> None:
            self._accumulation_for(saved)
            kept.append(saved)

        counters, resumed = self._session.load(
            input_dir, resume=resume, verify=verify, check=keep if keep_batch else None
        )
        for saved in kept:
            self._keep(saved)
        self.step = step_of(counters, self.step, self.gradient_accumulation_steps)
        return resumed

    def _samples_at_once(self) -> int:
        """The samples of a micro-batch on all ranks, of the first loader; 0 if no loader is prepared."""
        loader = next((loader for loader in self._dataloaders if hasattr(loader, "position")), None)
        return 0 if loader is None else samples_at_once(loader)

    def _samples_of_step(self) -> int:
        return self._samples_at_once() * self.gradient_accumulation_steps

    def _accumulation_for(self, saved: SavedBatch) -> int:
        size = self.run.data_parallel_size
        return saved.accumulation_for(size, samples=self._samples_at_once(), splits=bool(self.split_batches))

    def _keep(self, saved: SavedBatch) -> None:
        """Continues with the samples of a step and the schedule of the run that saved a checkpoint."""
        before, self.gradient_accumulation_steps = self.gradient_accumulation_steps, self._accumulation_for(saved)
        self._needs_accumulate = before == 1 and self.gradient_accumulation_steps > 1
        self._steps_at_once = saved.steps_at_once
        for scheduler in self._schedulers:
            if isinstance(scheduler, PreparedScheduler):
                scheduler.steps_at_once = self._steps_at_once
        if self.is_main_process and before != self.gradient_accumulation_steps:
            say_batch(saved, self.run.data_parallel_size, before, self.gradient_accumulation_steps)

    def _source(self) -> Source:
        """The objects that a checkpoint contains."""
        return Source(
            run=self.run,
            project=self.project_configuration,
            modules=weakly(self._saved_models),
            training=weakly(self._training),
            save_hooks=self._save_model_state_pre_hook,
            load_hooks=self._load_model_state_pre_hook,
        )

    def _saved_models(self) -> list[nn.Module]:
        """The prepared modules that checkpoints contain."""
        return self._models

    def _training(self, modules: Sequence[nn.Module]) -> TrainingObjects:
        wanted = {id(module) for module in modules}
        return TrainingObjects(
            run=self.run,
            models=[self.run.prepared(module) if id(module) in wanted else None for module in self._models],
            optimizers=[getattr(prepared, "optimizer", prepared) for prepared in self._optimizers],
            schedulers=self._schedulers,
            loaders=self._dataloaders,
            custom=self._custom_objects,
            scaler=self.scaler,
            counters={
                "step": self.step,
                "iteration": self.save_iteration,
                "accumulation": self.gradient_accumulation_steps,
                "samples": self._samples_of_step(),
                "steps_at_once": self._steps_at_once,
            },
        )

    # ---- the end -----------------------------------------------------------------------------------------------------
    @skipped(returns_none)
    def save(self, *args: Any, **kwargs: Any) -> None:
        """Writes an object on the main process, as Accelerate does."""
        super().save(*args, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        """Releases all prepared objects. Models that no plugin has sharded can be prepared again."""
        self._session.wait()
        self._teardown()
        result = super().free_memory(*objects)
        self._models += [record.module for record in self.run.models]
        return result

    def end_training(self) -> None:
        """Waits for a save in progress, finishes trackers, releases all prepared objects, and disconnects the ranks."""
        self._session.wait()
        self.run.backend.step_boundary()  # reads the values that are still to be logged
        if sys.exc_info()[0] is None:
            self.run.shared_inputs.compare()
        while self._interruptions:
            self._interruptions.pop().close()
        self._teardown()
        super().end_training()
        if self._watchdog is not None:
            self._watchdog.stop()
        self.run.backend.shutdown()

    def _kept_models(self) -> list[PreparedModel]:
        """The models that stay prepared when the others are released."""
        return []

    def _teardown(self) -> None:
        prepare.release(self.run, self._kept_models())
        self._step = Step(self.run, self.gradient_state)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy in another process keeps: the plan, this rank's coordinates and the loaders, but no connection to
        other ranks and no prepared model."""
        prepared: dict[str, list[Any]] = {
            name: [] for name in ("_models", "_optimizers", "_schedulers", "_interruptions")
        }
        return {**self.__dict__, **prepared, **dict.fromkeys(("_step", "_session", "_watchdog"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._step = Step(self.run, self.gradient_state)
        self._session = Session(self._source())


def _owner_of(model: nn.Module) -> Owner:
    """The NeuronAccelerator that prepared a model, if one did."""
    owner = getattr(model, "_neuron_accel_owner", None)
    return owner if isinstance(owner, Owner) else Owner()


def _release(run: Run, accelerator: NeuronAccelerator | None) -> None:
    """Releases the models of a run, whose accelerator may be gone, and marks its optimizers as released."""
    optimizers = run.optimizers
    if accelerator is None:
        prepare.release(run)
    else:
        NeuronAccelerator.free_memory(accelerator)
    for optimizer in optimizers:
        optimizer.release()


def _backward_scale(scaler: Any, state: GradientState) -> float:
    """See ``Run.backward_scale``."""
    if scaler is not None:
        raise UsageError(
            "mixed_precision='fp16' is not possible here.",
            why="a plugin runs the backward passes itself, before the loss scaling that fp16 needs can be applied",
            fix="use mixed_precision='bf16', which needs no loss scaling",
        )
    return 1.0 / state.num_steps


def _wraps(prepared: Any, optimizer: Any) -> bool:
    """Whether ``prepared`` is ``optimizer`` or wraps it, or was prepared from it."""
    if getattr(prepared, "given", None) is optimizer:
        return True
    while prepared is not None:
        if prepared is optimizer:
            return True
        prepared = getattr(prepared, "optimizer", None)
    return False
