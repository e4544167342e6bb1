"""What turns transformers' ``Trainer``, or a subclass of it, into one that trains by strategies.

The Trainer stays transformers' own: its loop, its callbacks, its bookkeeping. Overridden is where it builds an
accelerator, prepares, and saves and loads.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from neuron_accel.trainer.accelerator import TrainersAccelerator  # isort: skip  # first: it settles the device
import torch
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch import nn
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_pt_utils import BatchRebalanceSampler

from neuron_accel.engine.plan.plugin import Claim
from neuron_accel.errors import ConfigurationError, UsageError
from neuron_accel.trainer.arguments import NeuronSeq2SeqTrainingArguments, NeuronTrainingArguments, StrategyArguments
from neuron_accel.trainer.checkpoints import Checkpointing
from neuron_accel.trainer.graphs import OneGraph
from neuron_accel.trainer.pipelined import filled_up, loss_inside
from neuron_accel.trainer.search import Searching

if TYPE_CHECKING:
    from torch.utils.data import Sampler


_log = logging.getLogger(__name__)
_OF_A_LOADER = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")
_FOLDER = "tmp_trainer"
"""Where a Trainer without arguments writes, as transformers' own does."""


class NeuronTrainerMixin(Checkpointing, OneGraph, Searching):
    """Put in front of a Trainer class, it makes that class train by strategies::

        class MyTrainer(NeuronTrainerMixin, SFTTrainer): ...

    Its arguments have to be :class:`~neuron_accel.trainer.StrategyArguments`, too.

    Attributes:
        accelerator: a :class:`~neuron_accel.NeuronAccelerator`; ``print(trainer.accelerator.plan.explain())``.
    """

    # of the Trainer behind this class
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

    def create_accelerator_and_postprocess(self) -> None:
        """Builds the accelerator with the strategies that the arguments name."""
        if not isinstance(self.args, StrategyArguments):
            raise UsageError(
                f"{type(self).__name__} was given {type(self.args).__name__}, which name no strategies.",
                fix="use NeuronTrainingArguments, or your own class of arguments with StrategyArguments in front",
            )
        args: Any = self.args  # transformers' training arguments, too
        if hasattr(self, "accelerator"):  # a search over hyperparameters begins a new trial
            self.accelerator.start_over()
        settings = args.accelerator_config.to_dict()
        loader = DataLoaderConfiguration(**{name: settings[name] for name in _OF_A_LOADER}, data_seed=args.data_seed)
        options = self._build_accelerator_args(  # type: ignore[attr-defined]
            dataloader_config=loader, gradient_accumulation_plugin=self._accumulation(settings)
        )
        self.accelerator = TrainersAccelerator(
            plugins=args.strategies(),
            backend=args.decision.backend,
            **{name: value for name, value in options.items() if value is not None},
        )
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=args.eval_use_gather_object
        )
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def _accumulation(self, settings: dict[str, Any]) -> GradientAccumulationPlugin:
        """The Trainer divides losses itself, so that the accelerator counts every micro-batch as a whole step."""
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
        """Preparing places a model, after it was sharded: unsharded it might not fit."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The prepared model; prepared for training also where it is first evaluated, since it can be sharded only
        once."""
        if self.accelerator.run.prepared(self.model) is None:
            self._check_heads(self.model)
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
                f"kv_size_multiplier={wanted} is not what this model needs: {found}.",
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
        if self.accelerator.run.models and self.accelerator.run.prepared(self.model) is None:  # model_init made it anew
            self.accelerator.start_over()
        return super()._inner_training_loop(  # type: ignore[misc]
            batch_size=batch_size,
            args=args,
            resume_from_checkpoint=resume_from_checkpoint,
            trial=trial,
            ignore_keys_for_eval=ignore_keys_for_eval,
        )

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Prepares what is not prepared yet and loads the checkpoint; returns the model and the loader."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        if getattr(self.optimizer, "released", False):
            _log.warning("Another Trainer has trained the model since; the optimizer of this one begins anew.")
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
        """Samples in an optimizer step: of all ranks that see different ones."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.data_parallel_size

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler | None:
        sampler = super()._get_train_sampler(train_dataset)  # type: ignore[misc]
        if isinstance(sampler, BatchRebalanceSampler) and self.args.world_size > 1:
            args, ranks = self.args, self.accelerator.data_parallel_size
            return BatchRebalanceSampler(
                lengths=sampler.lengths,
                effective_batch_size=args.train_batch_size * args.gradient_accumulation_steps * ranks,
                dp_size=ranks,
                grad_accum=args.gradient_accumulation_steps,
                rank=self.accelerator.data_parallel_rank,
                drop_last=args.dataloader_drop_last,
            )
        return sampler

    # ---- losses ------------------------------------------------------------------------------------------------------
    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        if not self._pipelined:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        inputs = filled_up(inputs, self.args.microbatches, self.label_names)
        normalised = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        parts = 1 if normalised or self.compute_loss_func is not None else self.current_gradient_accumulation_steps
        # A pipeline's backward passes run before the loss can be divided; the accelerator divides it inside.
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


# ---- Trainers of transformers that train by strategies ---------------------------------------------------------------
class NeuronTrainer(NeuronTrainerMixin, Trainer):
    """transformers' ``Trainer``, by the strategies that its :class:`NeuronTrainingArguments` name; without arguments by
    none, and with ``output_dir="tmp_trainer"``. It takes what ``Trainer`` takes."""

    def __init__(self, model: Any = None, args: Any = None, *further: Any, **named: Any) -> None:
        super().__init__(model, NeuronTrainingArguments(_FOLDER) if args is None else args, *further, **named)


class NeuronSeq2SeqTrainer(NeuronTrainerMixin, Seq2SeqTrainer):
    """transformers' ``Seq2SeqTrainer``, by the strategies that its :class:`NeuronSeq2SeqTrainingArguments` name;
    without arguments by none, and with ``output_dir="tmp_trainer"``. It takes what ``Seq2SeqTrainer`` takes."""

    def __init__(self, model: Any = None, args: Any = None, *further: Any, **named: Any) -> None:
        super().__init__(model, NeuronSeq2SeqTrainingArguments(_FOLDER) if args is None else args, *further, **named)
