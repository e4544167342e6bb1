# SPDX-License-Identifier: Apache-2.0
"""The functions that the conformance kit runs on ranks, and the cases that they receive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuron_accel.engine.plan.plugin import StrategyPlugin

from .parity import Batch, Trace, Training, loader_of, loss_of, train_alone
from .xla_ranks import one_at_a_time


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training. Ranks receive a copy; functions in it are pickled by name.

    Args:
        model: builds the model that is prepared.
        plugins: all plugins of the run.
        batches: global micro-batches.
        training: the optimizer and other options.
        backend: the kind of ranks, as in ``run_ranks``.
    """

    model: Callable[[], nn.Module]
    plugins: tuple[StrategyPlugin, ...]
    batches: Sequence[Batch]
    training: Training
    backend: str = "gloo"


class Trainee:
    """A prepared model, optimizer and loader on this rank.

    Args:
        case: what to train.
        seed: seed of the model's initial weights.
    """

    def __init__(self, case: Case, *, seed: int = 0) -> None:
        from neuron_accel import NeuronAccelerator

        training = case.training
        self.case = case
        config: dict[str, Any] = {"gradient_accumulation_steps": training.accumulation}
        if case.backend == "xla":
            config["backend"] = "xla"
        self.accelerator = NeuronAccelerator(plugins=case.plugins, config=config)
        with one_at_a_time():
            torch.manual_seed(seed)
            self.original = case.model()
            self.original.train()
            if training.prepare_model:
                training.prepare_model(self.original)
            optimizer = training.optimizer(self.original.parameters())
        loader = loader_of(case.batches, self.accelerator.data_parallel_size)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.original, optimizer, loader)

    def steps(self) -> Iterator[int]:
        """Trains one epoch; yields the number of micro-batches after each."""
        accelerator = self.accelerator
        for done, batch in enumerate(self.loader, start=1):
            with accelerator.accumulate(self.model):
                accelerator.backward(loss_of(self.model(**batch)))
                if accelerator.sync_gradients and self.case.training.max_norm is not None:
                    accelerator.clip_grad_norm_(self.model.parameters(), self.case.training.max_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
            yield done

    def train(self) -> None:
        """Trains one epoch."""
        for _ in self.steps():
            pass

    def weights(self) -> dict[str, torch.Tensor]:
        """The unsharded weights of the original model, on the main process; empty on the others."""
        weights = self.accelerator.get_state_dict(self.model)
        return {k: v.clone() for k, v in weights.items()} if self.accelerator.is_main_process else {}


def train_and_save(case: Case, folder: str, steps: int) -> tuple[dict, dict]:
    """Trains, and saves after ``steps`` micro-batches; returns the weights then and at the end, on the main process."""
    trainee = Trainee(case)
    saved = {}
    for done in trainee.steps():
        if done == steps:
            trainee.accelerator.save_state(folder)
            saved = trainee.weights()
    return saved, trainee.weights()


def load_and_finish(case: Case, folder: str) -> tuple[dict, dict]:
    """Loads a checkpoint into a model with other initial weights and trains to the end of the epoch; returns the
    weights after loading and at the end, on the main process."""
    trainee = Trainee(case, seed=1)
    trainee.accelerator.load_state(folder)
    loaded = trainee.weights()
    trainee.train()
    return loaded, trainee.weights()


def train_alone_with(
    model_fn: Callable[[], nn.Module],
    batches: Sequence[Batch],
    training: Training,
    *,
    plugin: StrategyPlugin,
    reference: Callable[[nn.Module], nn.Module],
    data_parallel_size: int,
) -> Trace:
    """The default reference: training in one process."""
    return train_alone(model_fn, batches, training, reference)


def frozen_names(
    model: Callable[[], nn.Module], training: Training, reference: Callable[[nn.Module], nn.Module]
) -> list[str]:
    """FQNs of the parameters that are frozen in the reference."""
    torch.manual_seed(0)
    built = model()
    if training.prepare_model:
        training.prepare_model(built)
    return [name for name, parameter in reference(built).named_parameters() if not parameter.requires_grad]


def identity(case: Case) -> dict[str, Any]:
    """Checks the result of ``unwrap_model``, and that the run still has all parameters."""
    with one_at_a_time():
        torch.manual_seed(0)
        names = [name for name, _ in case.model().named_parameters(remove_duplicate=False)]
    trainee = Trainee(case)
    trainee.train()
    unwrapped = trainee.accelerator.unwrap_model(trainee.model)
    record = trainee.accelerator.run.prepared(trainee.model)
    known = {name for r in record.parameters for name in r.names} if record else set()
    return {
        "same": unwrapped is trainee.original,
        "found": f"a {type(unwrapped).__name__} instead of the {type(trainee.original).__name__} that was prepared",
        "missing": [name for name in names if name not in known],
    }


def train_and_leave(case: Case) -> None:
    """Trains, and calls ``end_training`` at the end."""
    trainee = Trainee(case)
    trainee.train()
    trainee.accelerator.end_training()


def fingerprint(plugins: Sequence[StrategyPlugin], world_size: int) -> str:
    """The fingerprint of the plan for these plugins, or the error as text."""
    from neuron_accel.engine.plan.planner import make_plan
    from neuron_accel.engine.plan.registry import default_registry
    from neuron_accel.errors import NeuronAccelError

    registry = default_registry()
    try:
        plan = make_plan(
            plugins,
            world_size=world_size,
            backend_capabilities=frozenset({"host-reads", "async", "point-to-point", "uneven-all-to-all"}),
            default_owners=registry.default_owners(),
            provenance=registry.provenance,
        )
    except NeuronAccelError as error:
        return f"{type(error).__name__}: {error}"
    return plan.fingerprint()


# ---- default models and batches --------------------------------------------------------------------------------------
VOCABULARY, HIDDEN, LENGTH, SAMPLES = 97, 32, 16, 4


def tiny_llama(*, tied: bool = False) -> nn.Module:
    """A Llama with two layers and about ten thousand parameters, of the shapes that are easy to overlook.

    On two tensor-parallel ranks its features and vocabulary are padded, and both hold the one key/value head. One
    layer is in no forward pass, and a buffer changes in each.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=47,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            # Larger weights than usual: Adam turns gradients that are mostly rounding errors into full updates.
            initializer_range=0.1,
        )
    )
    model.add_module("unused", nn.Linear(3, 1))
    model.register_buffer("largest_token", torch.zeros(()))
    model.register_forward_pre_hook(_note_tokens, with_kwargs=True)
    return model


def _note_tokens(model: Any, args: Any, kwargs: Any) -> None:
    """Notes the largest token so far, however often and on however many samples at once the model runs."""
    model.largest_token.copy_(torch.maximum(model.largest_token, kwargs["input_ids"].float().max()))


tiny_tied_llama = functools.partial(tiny_llama, tied=True)


def token_batches(count: int) -> list[Batch]:
    """Batches with ``input_ids`` and equal ``labels`` of shape ``[SAMPLES, LENGTH]``, int64, of random tokens. The
    largest token of each is in its first sample."""
    generator = torch.Generator().manual_seed(7)
    batches: list[Batch] = []
    for index in range(count):
        ids = torch.randint(VOCABULARY - count, (SAMPLES, LENGTH), generator=generator)
        ids[0, 0] = VOCABULARY - count + index
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return batches


def freeze_every_second(model: nn.Module) -> None:
    """Freezes the second, fourth, ... parameter in the order of their names."""
    for index, name in enumerate(sorted(name for name, _ in model.named_parameters())):
        if index % 2:
            model.get_parameter(name).requires_grad_(False)


def as_it_is(model: nn.Module, plugin: StrategyPlugin) -> nn.Module:
    """The reference for plugins that change neither a model's function nor which parameters are trained."""
    return model


def just_built(model_fn: Callable[[], nn.Module], plugin: StrategyPlugin) -> nn.Module:
    """Builds a model without further steps."""
    return model_fn()


def differing(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not exactly equal, or only in one of the mappings."""
    return sorted(
        name
        for name in {*expected, *found}
        if name not in expected or name not in found or not torch.equal(expected[name], found[name])
    )
