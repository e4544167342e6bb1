# SPDX-License-Identifier: Apache-2.0
"""The arguments, defaults and names of optimum-neuron that a training script uses."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuron_accel.engine.plan.registry import default_registry
from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.precision import ROUNDING

_log = logging.getLogger(__name__)

_WITHOUT_EFFECT = {
    "dataloader_prefetch_size": "prepared loaders transfer batches themselves; dataloader_prefetch_factor sets how "
    "many each worker loads in advance",
    "skip_cache_push": "no compile cache is pushed to the hub; see `neuron-accel launch --cache-dir` for a shared one",
    "num_local_ranks_per_step": "each rank reads only its shards of a model that was built with "
    "lazy_load_for_parallelism, so that all of a machine may read at once",
    "use_xser": "checkpoints are safetensors, of which each rank writes its shards",
    "fuse_qkv": "models of transformers are trained as they are",
    "recompute_causal_mask": "models of transformers compute their own mask",
    "metrics_window_size": "the run report has every step",
    "overwrite_output_dir": "training in a folder with checkpoints begins anew unless resume_from_checkpoint is set",
}
_METRICS = ("enable_throughput_metrics", "enable_mfu_metrics", "enable_efficiency_metrics")
_OF_ZERO = ("optimizer_use_master_weights", "optimizer_use_fp32_grad_acc", "optimizer_save_master_weights_in_ckpt")
_BATCHES = ("per_device_train_batch_size", "per_device_eval_batch_size")


_SWITCH = {"nargs": "?", "const": True}
"""For ``HfArgumentParser``: a flag without a value means True."""


def _of_optimum(text: str, **flag: Any) -> Any:
    return field(default=None, metadata={"help": f"Of optimum-neuron. {text}", **flag})


@dataclass
class OptimumArguments:
    """The arguments of optimum-neuron that transformers and :class:`StrategyArguments` do not have.

    Those without an equivalent are accepted, with a warning that says what is done instead.
    """

    optimum_neuron_defaults: bool = field(
        default=False,
        metadata={
            "help": "Use the defaults of optimum-neuron: zero_1, a batch of 1 per device, and with bf16 weights in "
            "bfloat16, float32 master weights and accumulation, and stochastic rounding instead of autocast."
        },
    )
    zero_1: bool | None = field(
        default=None,
        metadata={"help": "Shard the optimizer over data-parallel ranks (ZeRO-1). Default: False.", **_SWITCH},
    )
    per_device_train_batch_size: int | None = field(
        default=None, metadata={"help": "Batch size of a rank in training. Default: 8."}
    )
    per_device_eval_batch_size: int | None = field(
        default=None, metadata={"help": "Batch size of a rank in evaluation. Default: 8."}
    )
    use_autocast: bool | None = _of_optimum(
        "With bf16: whether weights are float32 and operations are cast (default).", **_SWITCH
    )
    stochastic_rounding_enabled: bool | None = _of_optimum(
        "Whether the device rounds to bfloat16 stochastically.", **_SWITCH
    )
    optimizer_use_master_weights: bool | None = _of_optimum(
        "Whether ZeRO-1 has float32 master weights (default).", **_SWITCH
    )
    optimizer_use_fp32_grad_acc: bool | None = _of_optimum("Whether gradients are summed in float32.", **_SWITCH)
    optimizer_save_master_weights_in_ckpt: bool | None = _of_optimum("Whether they are saved (default).", **_SWITCH)
    enable_throughput_metrics: bool | None = _of_optimum("Write a run report to output_dir/run_report.", **_SWITCH)
    enable_mfu_metrics: bool | None = _of_optimum("As enable_throughput_metrics.", **_SWITCH)
    enable_efficiency_metrics: bool | None = _of_optimum("As enable_throughput_metrics.", **_SWITCH)
    dataloader_prefetch_size: int | None = _of_optimum("Without effect.")
    skip_cache_push: bool | None = _of_optimum("Without effect.", **_SWITCH)
    num_local_ranks_per_step: int | None = _of_optimum("Without effect.")
    use_xser: bool | None = _of_optimum("Without effect.", **_SWITCH)
    fuse_qkv: bool | None = _of_optimum("Without effect.", **_SWITCH)
    recompute_causal_mask: bool | None = _of_optimum("Without effect.", **_SWITCH)
    metrics_window_size: int | None = _of_optimum("Without effect.")
    overwrite_output_dir: bool | None = _of_optimum("Without effect.", **_SWITCH)

    @property
    def trn_config(self) -> OptimumArguments:
        """What ``NeuronModelForCausalLM.from_pretrained`` expects as its second argument."""
        return self

    @property
    def bf16_weights(self) -> bool:
        """Whether the weights of the model are bfloat16, instead of cast in each operation."""
        return bool(getattr(self, "bf16", False)) and self.use_autocast is False

    def _fill_in_defaults(self) -> None:
        """Replaces the values that were not given."""
        theirs = self.optimum_neuron_defaults
        if self.zero_1 is None:
            self.zero_1 = theirs and not getattr(self, "fully_sharded", False)
        for name in _BATCHES:
            if getattr(self, name) is None:
                setattr(self, name, 1 if theirs else _default_of(type(self), name))
        if not theirs:
            return
        for name, value in (
            ("use_autocast", False),
            ("optimizer_use_master_weights", True),
            ("optimizer_use_fp32_grad_acc", True),
            ("stochastic_rounding_enabled", True),
        ):
            if getattr(self, name) is None and (name not in _OF_ZERO or self._has_zero):
                setattr(self, name, value)

    @property
    def _has_zero(self) -> bool:
        return bool(self.zero_1 or getattr(self, "fully_sharded", False))

    def _check_optimum(self) -> None:
        given = [name for name in _OF_ZERO if getattr(self, name) is not None]
        if given and not self._has_zero and not getattr(self, "plugins", None):
            raise ConfigurationError(
                f"{given[0]} has no effect here.",
                why="it is an option of the optimizer of zero_1, which is off by default, unlike in optimum-neuron",
                fix="set zero_1, or optimum_neuron_defaults for all defaults of optimum-neuron",
            )
        if self.bf16_weights and not self._has_zero:
            raise ConfigurationError(
                "Weights in bfloat16 (use_autocast=False) need zero_1 or fully_sharded.",
                why="without their float32 master weights, updates smaller than a bfloat16 can show are lost",
                fix="set zero_1, or leave use_autocast out",
            )

    def _warn_of_optimum(self, is_first: bool) -> None:
        for name, instead in _WITHOUT_EFFECT.items():
            if getattr(self, name) is not None:
                level = logging.WARNING if is_first else logging.DEBUG
                _log.log(level, "%s of optimum-neuron has no effect here: %s.", name, instead)

    def _zero_options(self) -> dict[str, Any]:
        """The options of the plugin of zero_1 or fully_sharded."""
        options: dict[str, Any] = {}
        if self.optimizer_use_master_weights is False:
            options["optimizer_dtype"] = torch.bfloat16
        if self.optimizer_use_fp32_grad_acc is not None:
            options["higher_cc_precision"] = options["use_grad_acc_hook"] = self.optimizer_use_fp32_grad_acc
        if self.optimizer_save_master_weights_in_ckpt is not None:
            options["save_master_weights"] = self.optimizer_save_master_weights_in_ckpt
        return options

    def _reports(self) -> list[Any]:
        """The plugin that measures throughput and utilization, if this is asked for."""
        wanted = any(getattr(self, name) for name in _METRICS)
        folder = Path(getattr(self, "output_dir", None) or "", "run_report")
        if not wanted:
            return []
        plugin: Any = default_registry().get("run_report")
        return [plugin(folder=folder, show="lines")]

    def _set_rounding_variable(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Sets the variable of the Neuron runtime, which has not started yet."""
        wanted, present = self.stochastic_rounding_enabled, environ.get(ROUNDING, "").strip()
        if wanted is None or (wanted and not getattr(self, "bf16", False)):
            return
        value = "1" if wanted else "0"
        if present and present != value and not self.optimum_neuron_defaults:
            raise ConfigurationError(
                f"stochastic_rounding_enabled={wanted} and {ROUNDING}={present} contradict each other.",
                where=f"environment variable {ROUNDING}",
                fix="leave one of them out",
            )
        environ.setdefault(ROUNDING, value)


def _default_of(cls: type, name: str) -> Any:
    """The default of an argument in the class of transformers' arguments."""
    classes = (c for c in cls.__mro__ if dataclasses.is_dataclass(c) and not issubclass(c, OptimumArguments))
    return next(f.default for c in classes for f in dataclasses.fields(c) if f.name == name)


def cast_weights(model: nn.Module, has_values: bool) -> None:
    """Converts the parameters of a model to bfloat16; buffers keep their dtype.

    Raises:
        ConfigurationError: if the model has no memory for its weights yet.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype == torch.bfloat16:
            continue
        if parameter.is_meta and has_values:
            raise ConfigurationError(
                f"{name!r} is {parameter.dtype}, and is read when the model is prepared.",
                where="bf16 with use_autocast=False",
                fix="load the model with dtype=torch.bfloat16",
            )
        parameter.data = parameter.data.to(torch.bfloat16)


class NeuronModelForCausalLM:
    """Builds causal models of transformers as scripts of optimum-neuron do."""

    @staticmethod
    def from_pretrained(
        name: str | os.PathLike[str],
        trn_config: Any = None,
        *,
        torch_dtype: Any = None,
        use_flash_attention_2: bool = False,
        **options: Any,
    ) -> Any:
        """Returns ``AutoModelForCausalLM.from_pretrained(name)``, a model of transformers that is not rewritten.

        Args:
            name: a model of the hub, or a folder.
            trn_config: not needed; ``arguments.trn_config`` is accepted.
            torch_dtype: dtype of the weights.
            use_flash_attention_2: optimum-neuron's kernel, as ``attn_implementation="flash_attention_2"``; a warning
                names its equivalent.
            options: arguments of transformers.
        """
        from transformers import AutoModelForCausalLM

        if use_flash_attention_2 or options.get("attn_implementation") == "flash_attention_2":
            options.pop("attn_implementation", None)
            _log.warning(
                "flash_attention_2 is the kernel of optimum-neuron; the equivalent is the plugin `flash_attention`."
            )
        if torch_dtype is not None:
            options["dtype"] = torch_dtype
        return AutoModelForCausalLM.from_pretrained(name, **options)
