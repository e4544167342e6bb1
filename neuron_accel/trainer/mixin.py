# SPDX-License-Identifier: Apache-2.0
"""Makes transformers' ``Trainer``, or a subclass of it, train with strategies.

The training loop and callbacks are those of transformers. The mixin overrides the methods that build the accelerator,
prepare objects, and save and load.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from neuron_accel.trainer.accelerator import TrainersAccelerator  # isort: skip  # first: it chooses the device
import torch
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch import nn
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback

from neuron_accel.engine.plan.plugin import Claim
from neuron_accel.errors import ConfigurationError, UsageError
from neuron_accel.trainer.arguments import NeuronSeq2SeqTrainingArguments, NeuronTrainingArguments, StrategyArguments
from neuron_accel.trainer.checkpoints import Checkpointing, Saving
from neuron_accel.trainer.gathering import check_gathering
from neuron_accel.trainer.graphs import OneGraph
from neuron_accel.trainer.optimum import cast_weights
from neuron_accel.trainer.pipelined import loss_inside, padded_batch
from neuron_accel.trainer.search import Searching

if TYPE_CHECKING:
    from neuron_accel.loop.interruption import Interruption


_log = logging.getLogger(__name__)
_OF_A_LOADER = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
_INSTEAD = (
    "create_accelerator_and_postprocess",
    "_move_model_to_device",
    "_wrap_model",
    "_prepare_for_training",
    "get_total_train_batch_size",
    "is_world_process_zero",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_scaler",
    "_load_best_model",
)
"""Methods of transformers' ``Trainer`` that the mixin replaces, also those of a subclass."""
_FOLDER = "tmp_trainer"
"""Output folder of a Trainer without arguments, as in transformers."""


class StopTogether(TrainerCallback):
    """Saves a checkpoint and ends the training once ``interruption`` is requested."""

    def __init__(self, interruption: Interruption) -> None:
        self.interruption = interruption

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.interruption.requested():
            control.should_save = control.should_training_stop = True


class EndTrial(TrainerCallback):
    """Ends the training of a run that only collects graphs after ``steps`` steps. The script goes on, so that the
    graphs of what it does after the training are collected, too. With ``evaluates`` an evaluation comes before, so that
    its graphs are among them whenever the training evaluates."""

    def __init__(self, steps: int, evaluates: bool) -> None:
        self.steps, self.evaluates, self.left = steps, evaluates, steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.left = self.steps

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.evaluates = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.left -= 1
        if not self.left:
            control.should_training_stop = True
            control.should_evaluate |= self.evaluates


class NeuronTrainerMixin(Checkpointing, OneGraph, Searching):
    """A mixin that makes a Trainer class train with strategies; it has to come before that class::

        class MyTrainer(NeuronTrainerMixin, SFTTrainer): ...

    The arguments of the Trainer have to be an instance of :class:`~neuron_accel.trainer.StrategyArguments`.

    Attributes:
        accelerator: a :class:`~neuron_accel.NeuronAccelerator`; print its plan with
            ``print(trainer.accelerator.plan.explain())``.
    """

    # attributes of the Trainer class
    optimizer: Any
    lr_scheduler: Any
    model_wrapped: Any
    compute_loss_func: Any
    label_smoother: Any
    label_names: list[str]
    model_accepts_loss_kwargs: bool
    current_gradient_accumulation_steps: int
    loss_is_scaled_for_ga: bool
    _created_lr_scheduler: bool
    _train_batch_size: int
    state: Any
    control: Any
    _stops_on_signal: bool = False

    def __repr__(self) -> str:
        model = type(getattr(self, "model", None)).__name__
        return f"<{type(self).__name__}: {model}; {getattr(self, 'accelerator', None)!r}>"

    def create_accelerator_and_postprocess(self) -> None:
        """Builds the accelerator with the strategies that the arguments select.

        Raises:
            UsageError: if the arguments are not :class:`~neuron_accel.trainer.StrategyArguments`, or if the Trainer
                gathers samples over ranks with the same ones.
        """
        if not isinstance(self.args, StrategyArguments):
            kind = "Seq2Seq" if hasattr(self.args, "predict_with_generate") else ""
            raise UsageError(
                f"{type(self).__name__} received {type(self.args).__name__}, which is not a StrategyArguments.",
                fix=f"use Neuron{kind}TrainingArguments, or derive your class of arguments from StrategyArguments "
                "first",
            )
        args: Any = self.args  # also transformers' training arguments
        if hasattr(self, "accelerator"):  # a hyperparameter search begins a new trial
            self.accelerator.start_over()
        settings = args.accelerator_config.to_dict()
        loader = DataLoaderConfiguration(**{name: settings[name] for name in _OF_A_LOADER}, data_seed=args.data_seed)
        options = self._build_accelerator_args(  # type: ignore[attr-defined]
            dataloader_config=loader, gradient_accumulation_plugin=self._accumulation(settings)
        )
        if args.bf16_weights:
            options["mixed_precision"] = "no"
        self.accelerator = TrainersAccelerator(
            plugins=args.strategies(),
            backend=args.decision.backend,
            **{name: value for name, value in options.items() if value is not None},
        )
        check_gathering(type(self), args, self.accelerator)
        if self.accelerator.is_main_process and (unused := unused_overrides(type(self))):
            _log.warning("neuron_accel does this itself, and does not call %s.", ", ".join(unused))
        args._mesh = self.accelerator.plan.mesh
        self.accelerator.samples_of_step = lambda: self._samples_at_once * args.gradient_accumulation_steps
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=args.eval_use_gather_object
        )
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def _accumulation(self, settings: dict[str, Any]) -> GradientAccumulationPlugin:
        """The Trainer divides losses itself, so for the accelerator each micro-batch is a step."""
        args, options = self.args, dict(settings["gradient_accumulation_kwargs"] or {})
        steps = options.pop("num_steps", None)
        if steps is not None:
            if args.gradient_accumulation_steps > 1:
                raise ConfigurationError(
                    "The number of gradient accumulation steps is given twice.",
                    where="gradient_accumulation_steps and accelerator_config.gradient_accumulation_kwargs.num_steps",
                    fix="keep the first",
                )
            args.gradient_accumulation_steps = steps
        return GradientAccumulationPlugin(num_steps=1, **options)

    @property
    def _pipelined(self) -> bool:
        """Whether a plugin runs backward passes inside the model's call."""
        return self.accelerator.run.owner(Claim.BACKWARD) is not None

    # ---- models and optimizers ---------------------------------------------------------------------------------------
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: `prepare` moves the model when it is sharded; unsharded it may not fit."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Prepares the model for training, also before an evaluation, since it can be sharded only once; returns it."""
        if self.accelerator.run.prepared(self.model) is None:
            self._check_heads(self.model)
            if self.args.bf16_weights:
                cast_weights(self.accelerator.unwrap_model(self.model), self.accelerator.run.backend.has_values)
            if self._pipelined:
                loss_inside(self.accelerator.unwrap_model(self.model), self.compute_loss_func, self.label_smoother)
        self.model_wrapped = self.accelerator.prepare_once(self.model)
        return self.model_wrapped

    def _check_heads(self, model: nn.Module) -> None:
        wanted = self.args.kv_size_multiplier
        config = getattr(model, "config", None)
        heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
        if wanted is None or heads is None:
            return
        found = -(-self.accelerator.tensor_parallel_size // heads)
        if wanted != found:
            raise ConfigurationError(
                f"kv_size_multiplier is {wanted}, but this model needs {found}.",
                why=f"it has {heads} key/value heads for {self.accelerator.tensor_parallel_size} tensor-parallel ranks",
                fix="leave it out",
            )

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        if self.accelerator.has_prepared_another(self.model):  # model_init has built a new model
            self.accelerator.start_over()
        with self._stopping_together(), self._ending_trial():
            return super()._inner_training_loop(  # type: ignore[misc]
                batch_size=batch_size,
                args=args,
                resume_from_checkpoint=resume_from_checkpoint,
                trial=trial,
                ignore_keys_for_eval=ignore_keys_for_eval,
            )

    @contextmanager
    def _stopping_together(self) -> Iterator[None]:
        """With ``enable_jit_checkpoint``, a context manager in which SIGTERM to any rank ends the training with a
        checkpoint after the same step on all of them. transformers' own callback stops each rank where it is."""
        theirs = [each for each in self.callback_handler.callbacks if type(each).__name__ == "JITCheckpointCallback"]  # type: ignore[attr-defined]
        if not theirs and not self._stops_on_signal:
            yield
            return
        self._stops_on_signal = True
        for callback in theirs:
            callback.on_train_end(self.args, self.state, self.control)  # restores the handler of SIGTERM
            self.remove_callback(callback)  # type: ignore[attr-defined]
        stop = StopTogether(self.accelerator.watch_for_interruption(["SIGTERM"]))
        self.add_callback(stop)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.remove_callback(stop)  # type: ignore[attr-defined]
            stop.interruption.close()

    @contextmanager
    def _ending_trial(self) -> Iterator[None]:
        steps = self.accelerator.trial_steps
        if steps is None:
            yield
            return
        callback = EndTrial(steps, getattr(self, "eval_dataset", None) is not None)
        self.add_callback(callback)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.remove_callback(callback)  # type: ignore[attr-defined]

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Prepares the model and the optimizer if they are not prepared, and loads the checkpoint; returns the model
        and the loader."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        if getattr(self.optimizer, "released", False):
            _log.warning("Another Trainer has since prepared the model; creating a new optimizer.")
            self.optimizer = None
        self.create_optimizer()  # type: ignore[attr-defined]
        model = self._wrap_model(self.model)
        self.optimizer = self.accelerator.prepare_optimizer(self.optimizer)
        self.create_scheduler(num_training_steps=max_steps)  # type: ignore[attr-defined]
        self.accelerator.register_for_checkpointing(self.lr_scheduler)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))  # type: ignore[attr-defined]
        self.callback_handler.train_dataloader = train_dataloader  # type: ignore[attr-defined]
        return model, train_dataloader

    # ---- data --------------------------------------------------------------------------------------------------------
    def get_total_train_batch_size(self, args: Any) -> int:
        """Number of samples in an optimizer step, over all data-parallel ranks."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.data_parallel_size

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process, although others may have the same ``args.process_index``."""
        return self.accelerator.is_main_process

    # ---- losses ------------------------------------------------------------------------------------------------------
    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        if not self._pipelined:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        inputs = padded_batch(inputs, self.args.microbatches, self.label_names)
        normalised = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        parts = 1 if normalised or self.compute_loss_func is not None else self.current_gradient_accumulation_steps
        # A pipeline runs backward passes before the Trainer divides the loss, so the accelerator divides it.
        self.accelerator.gradient_accumulation_steps = parts
        given, self.loss_is_scaled_for_ga = self.loss_is_scaled_for_ga, True
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            self.accelerator.gradient_accumulation_steps, self.loss_is_scaled_for_ga = 1, given
        return loss / parts

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        if not self._pipelined:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            share = self.accelerator.data_parallel_size if self.args.average_tokens_across_devices else 1
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch / share}
        outputs = model(**inputs)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return (loss, outputs) if return_outputs else loss


def unused_overrides(trainer: type) -> list[str]:
    """The methods of classes derived from transformers' ``Trainer`` that the mixin does not call."""
    order = trainer.__mro__
    theirs = [
        each for each in order[order.index(NeuronTrainerMixin) : order.index(Saving)] if issubclass(each, Trainer)
    ]
    return [f"{each.__name__}.{name}" for each in theirs for name in _INSTEAD if name in vars(each)]


# ---- transformers' Trainers with the mixin ---------------------------------------------------------------------------
class NeuronTrainer(NeuronTrainerMixin, Trainer):
    """transformers' ``Trainer`` with the strategies of its :class:`NeuronTrainingArguments`.

    It has the parameters of ``Trainer``. Without arguments it uses no strategies, and ``output_dir="tmp_trainer"``.
    """

    def __init__(self, model: Any = None, args: Any = None, *further: Any, **named: Any) -> None:
        super().__init__(model, NeuronTrainingArguments(_FOLDER) if args is None else args, *further, **named)


class NeuronSeq2SeqTrainer(NeuronTrainerMixin, Seq2SeqTrainer):
    """transformers' ``Seq2SeqTrainer`` with the strategies of its :class:`NeuronSeq2SeqTrainingArguments`.

    It has the parameters of ``Seq2SeqTrainer``. Without arguments it uses no strategies, and
    ``output_dir="tmp_trainer"``.
    """

    def __init__(self, model: Any = None, args: Any = None, *further: Any, **named: Any) -> None:
        super().__init__(model, NeuronSeq2SeqTrainingArguments(_FOLDER) if args is None else args, *further, **named)
