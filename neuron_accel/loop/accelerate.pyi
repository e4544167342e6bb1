# SPDX-License-Identifier: Apache-2.0
"""What a NeuronAccelerator inherits from ``accelerate.Accelerator``, which ships no types: without this mypy would take
every name on an accelerator for one that it has. Names that it does not have, or that it lacks, fail a test."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

F = TypeVar("F", bound=Callable[..., Any])

class Accelerator:
    # ---- where a process stands ------------------------------------------------------------------------------------
    @property
    def device(self) -> torch.device: ...
    @property
    def process_index(self) -> int: ...
    distributed_type: Any
    is_local_main_process: bool
    is_main_process: bool
    local_process_index: int
    multi_device: bool
    use_distributed: bool
    should_save_model: bool
    state: Any

    # ---- as it was constructed -------------------------------------------------------------------------------------
    dataloader_config: Any
    device_placement: bool
    dispatch_batches: bool | None
    even_batches: bool
    gradient_accumulation_steps: int
    log_with: list[Any]
    logging_dir: str | None
    mixed_precision: str
    non_blocking: bool
    project_configuration: Any
    project_dir: str | None
    rng_types: list[Any] | None
    split_batches: bool
    step_scheduler_with_optimizer: bool
    use_seedable_sampler: bool
    use_stateful_dataloader: bool

    autocast_handler: Any
    ddp_handler: Any
    init_handler: Any
    profile_handler: Any
    scaler_handler: Any

    # ---- what is refused here, and stays empty ---------------------------------------------------------------------
    ao_recipe_handler: Any
    data_parallel_shard_rank: int
    deepspeed_plugin: Any
    delayed_fp8_autocast: bool
    fp8_backend: Any
    fp8_enabled: bool
    fp8_recipe_handler: Any
    has_fp8_handler: bool
    has_lomo_optimizer: bool
    is_composable_parallelism_enabled: bool
    is_fsdp2: bool
    msamp_recipe_handler: Any
    parallelism_config: Any
    te_recipe_handler: Any
    torch_device_mesh: Any

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any: ...
    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None: ...
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]: ...

    # ---- a step ----------------------------------------------------------------------------------------------------
    flag_tensor: torch.Tensor | None
    gradient_state: Any
    native_amp: bool
    optimizer_step_was_skipped: bool
    scaler: Any
    step: int
    sync_gradients: bool

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[None]: ...
    def set_trigger(self) -> None: ...
    def unscale_gradients(self, optimizer: Any = None) -> None: ...

    # ---- one process, or one after the other -----------------------------------------------------------------------
    def local_main_process_first(self) -> AbstractContextManager[None]: ...
    def main_process_first(self) -> AbstractContextManager[None]: ...
    def on_last_process(self, function: F) -> F: ...
    @overload
    def on_main_process(self, function: F) -> F: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[F], F]: ...
    @overload
    def on_local_main_process(self, function: F) -> F: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Callable[[F], F]: ...
    @overload
    def on_process(self, function: F, process_index: int | None = None) -> F: ...
    @overload
    def on_process(self, function: None = None, process_index: int | None = None) -> Callable[[F], F]: ...
    @overload
    def on_local_process(self, function: F, local_process_index: int | None = None) -> F: ...
    @overload
    def on_local_process(self, function: None = None, local_process_index: int | None = None) -> Callable[[F], F]: ...

    # ---- trackers, checkpoints, models -----------------------------------------------------------------------------
    save_iteration: int
    trackers: list[Any]

    def get_tracker(self, name: str, unwrap: bool = False) -> Any: ...
    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = {},
    ) -> None: ...
    def clear(self, *objects: Any) -> Any: ...
    def register_for_checkpointing(self, *objects: Any) -> None: ...
    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle: ...
    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle: ...
    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any: ...
    def verify_device_map(self, model: nn.Module) -> bool: ...

    # ---- what NeuronAccelerator overrides, and calls ---------------------------------------------------------------
    def __init__(self, **options: Any) -> None: ...
    accumulate: Any
    backward: Any
    clip_grad_norm_: Any
    clip_grad_value_: Any
    end_training: Any
    free_memory: Any
    gather: Any
    gather_for_metrics: Any
    get_state_dict: Any
    join_uneven_inputs: Any
    log: Any
    no_sync: Any
    pad_across_processes: Any
    prepare_data_loader: Any
    prepare_model: Any
    prepare_optimizer: Any
    prepare_scheduler: Any
    print: Any
    save: Any
    save_model: Any
    wait_for_everyone: Any

    _custom_objects: list[Any]
    _dataloaders: list[Any]
    _load_model_state_pre_hook: dict[int, Callable[..., None]]
    _models: list[Any]
    _optimizers: list[Any]
    _save_model_state_pre_hook: dict[int, Callable[..., None]]
    _schedulers: list[Any]
