# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a Trainer: sharded, in its ``checkpoint-N`` folders, and loadable on any mesh."""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length, rotate_checkpoints

from neuron_accel.checkpoint.format.index import is_pretrained
from neuron_accel.checkpoint.format.manifest import has_manifest, read_manifest
from neuron_accel.checkpoint.state.full_state import without_ties
from neuron_accel.checkpoint.state.resume import say_batch
from neuron_accel.checkpoint.state.training import random_state, set_random_state
from neuron_accel.checkpoint.tools.consolidate import consolidate
from neuron_accel.engine.plan.restart import find_restart
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel
    from neuron_accel.trainer.accelerator import TrainersAccelerator


_ROUNDING = 1e-4
"""Tolerance of comparisons of positions, in epochs."""


class NotedStep(int):
    """The step of the best checkpoint, once it is noted: false in a condition, but the same number in the saved
    state."""

    def __bool__(self) -> bool:
        return False


class Saving(Trainer):
    """What a Trainer with the mixin has between transformers' ``Trainer`` and the classes derived from it: their own
    ``save_model`` and ``_save`` are called, and may call these."""

    accelerator: TrainersAccelerator

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the full model by ``_save``, on the main process; for a checkpoint of the Trainer a sharded checkpoint
        instead, or in addition if a subclass overrides ``_save``. Collective."""
        if self._has_no_values:
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        sharded = _internal_call and not self.args.save_only_model
        if not sharded or type(self)._save is not Trainer._save:
            self._write_full(folder)
        if sharded:
            self.accelerator.save_state(folder, tokenizer=self._tokenizer_to_save, async_save=self.args.async_save)
        if _internal_call:
            self._note_best_checkpoint(folder)  # type: ignore[attr-defined]
        elif self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_full(self, folder: str) -> None:
        run, module = self.accelerator.run, self._wrap_model(self.model)
        record, state = run.prepared(module), self.accelerator.get_state_dict(module)
        if record is None:
            raise ValueError("the model is not prepared")

        sharded = run.backend.is_lazy or any(r.layout.cuts or r.holders or r.weights for r in record.parameters)

        def write() -> None:
            if self.accelerator.is_main_process:
                with full_values(record, state) if sharded else nullcontext():
                    self._save(folder, state_dict=without_ties(state))

        agreed(run, write)
        self.accelerator.wait_for_everyone()

    @property
    def _has_no_values(self) -> bool:
        return self.accelerator.is_precompiling or not self.accelerator.run.backend.has_values

    @property
    def _tokenizer_to_save(self) -> Any:
        given = getattr(self, "processing_class", None)
        return given if given is not None else getattr(getattr(self, "data_collator", None), "tokenizer", None)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; without values nothing is uploaded."""
        return None if self._has_no_values else super().push_to_hub(*args, **kwargs)

    # The sharded checkpoint contains these.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None: ...
    def _save_scaler(self, output_dir: str) -> None: ...
    def _save_rng_state(self, output_dir: str) -> None: ...


@contextmanager
def full_values(record: PreparedModel, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context in which the modules of a sharded model have full weights on the CPU, so that whatever writes a model may
    be called on one rank: ``state_dict`` and ``save_pretrained`` of a module are its own. Calling one is an error, and
    so is the ``state_dict`` of one of which other ranks have parts.

    Args:
        record: the model.
        state: its full state dict.
    """
    undo, new = ExitStack(), dict[int, nn.Parameter]()
    with undo:
        for holder in (vars(record.original), vars(record.module)):
            if (replaced := holder.pop("save_pretrained", None)) is not None:
                undo.callback(holder.__setitem__, "save_pretrained", replaced)
        parts = dict(record.inner.named_modules())
        for part in parts.values():
            undo.callback(part.register_forward_pre_hook(_refuse_call, prepend=True).remove)
            undo.callback(setattr, part, "_state_dict_pre_hooks", part._state_dict_pre_hooks)
            part._state_dict_pre_hooks = OrderedDict()  # a plugin's refuses: it knows of shards
        for name in (name for each in record.parameters if each.current is None for name in each.names):
            parents = name.split(".")[:-1]
            for part in (parts.get(".".join(parents[:end])) for end in range(len(parents) + 1)):
                if part is not None:
                    part._state_dict_pre_hooks = OrderedDict({0: _refuse_state})
        for name, value in state.items():
            path, _, own = name.rpartition(".")
            for held in (parts[path]._parameters, parts[path]._buffers) if path in parts else ():
                if (was := held.get(own)) is not None:
                    undo.callback(held.__setitem__, own, was)
                    if isinstance(was, nn.Parameter):
                        value = new.setdefault(id(value), nn.Parameter(value, requires_grad=was.requires_grad))
                    held[own] = value
        yield


def _refuse_state(module: nn.Module, *_: Any) -> NoReturn:
    raise UsageError(
        f"This process has only some parts of {type(module).__name__}, those of its stage.",
        where="`_save` of a Trainer",
        why="the model is a pipeline, and a file with its `state_dict()` would lack the parts of other stages",
        fix="write the `state_dict` that `_save` receives",
    )


def _refuse_call(*_: Any) -> NoReturn:
    raise UsageError(
        "A sharded model cannot be called while it is saved.",
        where="`_save` of a Trainer",
        why="only the main process saves, and the other ranks do not take part in the call",
        fix="call the model before or after, on every rank",
    )


class Checkpointing:
    """The methods of a Trainer that load checkpoints, and what surrounds saving."""

    accelerator: TrainersAccelerator
    model: nn.Module
    args: Any
    _has_no_values: bool
    _resumed_random: dict[str, Any] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Puts :class:`Saving` below the classes that are derived from transformers' ``Trainer``."""
        super().__init_subclass__(**options)
        if issubclass(cls, Trainer) and not issubclass(cls, Saving):
            cls.__bases__ = (*(base for base in cls.__bases__ if base is not Trainer), Saving)

    # ---- saving ------------------------------------------------------------------------------------------------------
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the full model, as the class of the Trainer does. Collective. Without values, as when precompiling or
        in a dry run, writes nothing."""
        if not self._has_no_values:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As in transformers, but with ``async_save`` older checkpoints are deleted only when the new one is
        complete. Without values, writes nothing."""
        if self._has_no_values:
            return
        args, state, limit = self.args, self.state, self.args.save_total_limit  # type: ignore[attr-defined]
        later = args.async_save and limit is not None
        best = state.best_global_step
        if later:
            args.save_total_limit = None
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]  # waits for an earlier save
        finally:
            args.save_total_limit, state.best_global_step = limit, best
        if later:
            self._retire(limit + 1, trial)

    def _note_best_checkpoint(self, folder: str) -> None:
        """On a lazy device, notes which checkpoint is the best, as transformers does next. transformers would first
        wait for the other ranks on the device, in a graph that differs between ranks."""
        state = self.state  # type: ignore[attr-defined]
        if not self.accelerator.is_lazy or not state.best_global_step:
            return
        self.accelerator.wait_for_everyone()
        best = Path(folder).with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if best.exists():
            state.best_model_checkpoint = str(best)
        state.best_global_step = NotedStep(state.best_global_step)

    def _retire(self, keep: int, trial: Any = None) -> None:
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=self._get_output_dir(trial),  # type: ignore[attr-defined]
                save_total_limit=keep,
                best_model_checkpoint=self.state.best_model_checkpoint,  # type: ignore[attr-defined]
                use_mtime=True,
            )

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        self.accelerator.wait_for_checkpoint()
        if self.args.async_save and self.args.save_total_limit is not None:
            self._retire(self.args.save_total_limit, trial)
        result = super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[misc]
        if self.args.consolidate_at_end:
            self._consolidate(trial)
        return result

    def _consolidate(self, trial: Any) -> None:
        """Writes the full model to the output folder, from the last checkpoint if it is of the last step."""
        state = self.state  # type: ignore[attr-defined]
        run_dir = self._get_output_dir(trial)  # type: ignore[attr-defined]
        last = Path(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        run = self.accelerator.run

        def usable() -> bool:
            return has_manifest(last) and not any(Path(run_dir).glob("*.safetensors*"))

        loaded_another = self.args.load_best_model_at_end and state.best_global_step not in (None, state.global_step)
        if loaded_another or not run.backend.broadcast_object(usable(), run.world):
            self.save_model(run_dir)
            return
        number = next(i for i, module in enumerate(self.accelerator._models) if module is self.model_wrapped)  # type: ignore[attr-defined]
        agreed(run, lambda: consolidate(last, Path(run_dir), model=number) if run.backend.rank == 0 else None)

    def _load_scaler(self, checkpoint: str | None) -> None: ...

    # ---- loading -----------------------------------------------------------------------------------------------------
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; ``resume_from_checkpoint=True`` resumes from the newest complete checkpoint. If the run
        was started again, by ``neuron-accel launch`` or because Slurm queued the job again, it resumes from the newest
        complete checkpoint that it has saved, if there is one, whatever ``resume_from_checkpoint`` is. A dry run starts
        from the first step.

        Raises:
            CheckpointError: if there is none, or the checkpoint cannot be loaded.
        """
        if not self.accelerator.run.backend.has_values:
            resume_from_checkpoint = None
        elif (own := self._own_checkpoint()) is not None:
            resume_from_checkpoint = own
        if resume_from_checkpoint is True:
            run = self.accelerator.run
            found = _newest(Path(self.args.output_dir)) if run.backend.rank == 0 else None
            resume_from_checkpoint = run.backend.broadcast_object(found, run.world)
            if resume_from_checkpoint is None:
                raise CheckpointError(
                    f"There is no complete checkpoint in {self.args.output_dir!r}.",
                    fix="start without resume_from_checkpoint, or pass the folder of a checkpoint",
                )
        if self.args.keep_batch and resume_from_checkpoint and has_manifest(Path(str(resume_from_checkpoint))):
            self._keep_batch(Path(str(resume_from_checkpoint)))
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    @property
    def _samples_at_once(self) -> int:
        """The samples of a micro-batch on all ranks."""
        ranks = 1 if self.args.accelerator_config.split_batches else self.accelerator.run.data_parallel_size
        return int(self.args.train_batch_size * ranks)

    def _keep_batch(self, folder: Path) -> None:
        """Accumulates so many micro-batches that a step has as many samples as in the run that saved."""
        saved, size = self.accelerator.saved_batch(folder), self.accelerator.run.data_parallel_size
        if not saved.samples:
            raise CheckpointError(
                "The checkpoint does not say how many samples an optimizer step had.",
                where=f"{folder}; keep_batch=True",
                why="it was saved by an earlier version, or not by this Trainer",
                fix="set gradient_accumulation_steps yourself, without keep_batch",
            )
        before = self.args.gradient_accumulation_steps
        now = saved.accumulation_for(size, samples=self._samples_at_once, splits=False)
        self.args.gradient_accumulation_steps = now
        if now != before and self.accelerator.is_main_process:
            say_batch(saved, size, before, now)

    def _own_checkpoint(self) -> str | None:
        """The newest complete checkpoint that this run saved before it was started again, or None. Collective."""
        run, restart, found = self.accelerator.run, find_restart(os.environ), None
        if restart is not None and run.backend.rank == 0:
            found = _newest(Path(self.args.output_dir), run=restart.run)
            print(f"neuron_accel: {restart.by}: {_resuming(found)}", file=sys.stderr, flush=True)
        return run.backend.broadcast_object(found, run.world)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Only checks the folder: the weights are loaded with the optimizer's state, when the model is prepared."""
        folder = Path(resume_from_checkpoint)
        if not has_manifest(folder) and not is_pretrained(folder):
            raise CheckpointError(
                f"{resume_from_checkpoint!r} is not a checkpoint.",
                where=str(folder),
                why="it has neither a manifest nor the weights of a model of transformers",
                fix="pass a folder that save_state, this Trainer or save_pretrained wrote",
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if has_manifest(folder):
            self.accelerator.load_state(folder)
            for loader in self.accelerator._dataloaders:
                if hasattr(loader, "forget_position"):
                    loader.forget_position()  # the Trainer skips batches itself
            self._resumed_random = random_state(self.accelerator.run.backend.generator)
        else:
            self._resumed_random = self.accelerator.load_stock(self.model, self.lr_scheduler, folder)  # type: ignore[attr-defined]

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *further: Any, **named: Any
    ) -> tuple[int, int]:
        """As in transformers, with a check that the number of steps, by which the Trainer skips batches, still
        corresponds to the epochs of the checkpoint."""
        result = super()._init_training_state(max_steps, num_update_steps_per_epoch, *further, **named)  # type: ignore[misc]
        state = self.state  # type: ignore[attr-defined]
        position = state.epoch  # of the checkpoint; None or 0 for a new training
        if position and not self.args.ignore_data_skip and has_length(self.train_dataset):  # type: ignore[attr-defined]
            epochs, steps = divmod(state.global_step, num_update_steps_per_epoch)
            # The last step of an epoch may have fewer micro-batches than the others.
            least = epochs + steps / num_update_steps_per_epoch
            most = epochs + min(1.0, steps / max(1, num_update_steps_per_epoch - 1))
            if not least - _ROUNDING <= position <= most + _ROUNDING:
                raise CheckpointError(
                    f"The checkpoint was saved after {position:g} epochs, but its {state.global_step} steps are "
                    f"{least:g} epochs in this training.",
                    where=str(self.args.output_dir),
                    why="the number of samples per step differs, so that data would be skipped or repeated",
                    fix="keep data-parallel ranks x per_device_train_batch_size x gradient_accumulation_steps, and the "
                    "data, unchanged, or set ignore_data_skip=True",
                )
        return result

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called after batches were skipped, which may have drawn random numbers."""
        if self._resumed_random is not None:
            set_random_state(self._resumed_random, self.accelerator.run.backend.generator)

    def _load_best_model(self) -> None:
        if self._has_no_values:
            return
        self.accelerator.load_weights(self.model, Path(self.state.best_model_checkpoint))  # type: ignore[attr-defined]


def _resuming(found: str | None) -> str:
    return "it saved no complete checkpoint" if found is None else f"resuming from {found}"


def _newest(folder: Path, run: str | None = None) -> str | None:
    """The complete checkpoint ``checkpoint-N`` with the highest number, or None.

    Args:
        folder: contains the checkpoints.
        run: only checkpoints that this run has saved count; None: all.
    """
    found = []
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.rpartition("-")[2]
        if number.isdecimal() and (has_manifest(path) or is_pretrained(path)) and _has_state(path):
            if run is not None and not _is_saved_by(path, run):
                continue
            found.append((int(number), path))
    return str(max(found)[1]) if found else None


def _is_saved_by(path: Path, run: str) -> bool:
    try:
        return read_manifest(path).info.get("run") == run
    except CheckpointError:
        return False


def _has_state(path: Path) -> bool:
    try:
        json.loads((path / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return True
