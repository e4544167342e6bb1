"""Trainings with guards, clean and with a planted fault; run inside ranks of either backend."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch

from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin

VOCABULARY = 96
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            initializer_range=0.1,
        )
    )


def token_batches(count, *, size=4, length=12):
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(VOCABULARY, (size, length), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each.clone()} for each in ids]


class Bigrams(torch.nn.Module):
    """The next token from this one, in a form that takes a moment to compile."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, labels=None, attention_mask=None, logits_to_keep=0):
        logits = self.head(self.norm(self.embedding(input_ids)))[:, -logits_to_keep:]
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def train(plugins, guards, *, fault="", steps=5, backend=None, accumulation=1, every_rank=False):
    """A training with clipping, metrics and a checkpoint; rank 1 (or every rank) does what ``fault`` names in step 4.

    Returns:
        what the recompile guard said, how many graphs it counted, and the losses.
    """
    from neuron_accel import NeuronAccelerator
    from neuron_accel.testing import one_at_a_time

    config = {"plugins": [*plugins, *guards], "gradient_accumulation_steps": accumulation}
    accelerator = NeuronAccelerator(config=config | ({"backend": backend} if backend else {}))
    with one_at_a_time() if backend == "xla" else contextlib.nullcontext():
        torch.manual_seed(0)
        model = llama() if TP2 in plugins else Bigrams()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    guilty = every_rank or accelerator.run.backend.rank == 1
    if fault == "a weight that differs" and guilty:
        with torch.no_grad():
            (model.model if TP2 in plugins else model).norm.weight[3] += 1e-3
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, batch in enumerate(token_batches(steps * accumulation)):
            fault_now = fault if guilty and number == 3 * accumulation else ""
            losses.append(one_step(accelerator, model, optimizer, batch, fault_now))
            if fault_now == "a shorter epoch":
                break
        evaluate(accelerator, model)
    said = [str(w.message) for w in caught if "graph" in str(w.message)]
    guard = next((p for p in accelerator.plan.plugins if p.spec.name == "recompile_guard"), None)
    graphs = guard.graphs(accelerator.run) if guard else None
    if backend != "xla":
        folder = accelerator.run.backend.broadcast_object(tempfile.mkdtemp(), accelerator.run.world)
        accelerator.save_state(folder)
    accelerator.end_training()
    return said, graphs, losses


def one_step(accelerator, model, optimizer, batch, fault):
    batch = {name: value.to(accelerator.device) for name, value in batch.items()}
    backend, world = accelerator.run.backend, accelerator.run.world
    if fault == "a shorter batch":
        batch = {name: value[:, :7] for name, value in batch.items()}
    if fault == "another dtype":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    options = {"logits_to_keep": 3} if fault == "another value" else {}
    with accelerator.accumulate(model):
        output = model(**(batch if not options else {"input_ids": batch["input_ids"]}), **options)
        loss = output.loss if output.loss is not None else output.logits.square().mean()
        accelerator.backward(loss)
        if fault == "an extra all-reduce":
            backend.all_reduce(torch.ones(3, device=accelerator.device), world)
        if fault == "gathering alone":
            accelerator.gather(torch.ones(2, device=accelerator.device))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if fault == "ending":
        accelerator.end_training()
        raise EOFError("ended")
    return backend.to_host(accelerator.gather(loss.detach().reshape(1))).mean().item()


def evaluate(accelerator, model):
    model.eval()
    with torch.no_grad():
        for batch in token_batches(2, length=20):
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            losses = accelerator.gather_for_metrics(model(**batch).loss.reshape(1))
            assert accelerator.run.backend.to_host(losses).isfinite().all()
    model.train()


@dataclass(frozen=True, kw_only=True)
class PlantsNaN(StrategyPlugin):
    """Makes the gradient of one parameter NaN on one rank, where its state says so, before anything sums it."""

    spec: ClassVar[PluginSpec] = PluginSpec(name="plants_nan", api_version=4, phase=Phase.GRADIENTS)

    rank: int = 1

    def transform_model(self, model, run):
        here = [r for r in model.parameters if r.current is not None and r.fqn.endswith("norm.weight")]
        if run.backend.rank == self.rank and here:
            run.state(self).update(armed=False, fqn=here[-1].fqn)
            handle = here[-1].current.register_hook(
                lambda gradient: gradient * float("nan") if run.state(self)["armed"] else None
            )
            run.undo(handle.remove)


def train_with_nan(plugins, action, *, steps=5, accumulation=1, at=None, left_out=None, backend=None, loss=False):
    """A training with clipping and a schedule, in which the gradients of one parameter of rank 1 (or its loss) are NaN
    in a micro-batch of step ``at``, counted from 1; or in which step ``left_out`` does not take place.

    Returns:
        warnings, steps said to be skipped, their number by the guard, learning rates after each step, the weights, and
        which parameter was NaN on this rank.
    """
    from neuron_accel_guards import FiniteGuard

    from neuron_accel import NeuronAccelerator
    from neuron_accel.testing import one_at_a_time

    plant, guards = PlantsNaN(), [FiniteGuard(action=action)] if action else []
    config = {"plugins": plugins, "gradient_accumulation_steps": accumulation}
    accelerator = NeuronAccelerator(plugins=[plant, *guards], config=config | ({"backend": backend} if backend else {}))
    sharded = any("model_parallelism" in plugin for plugin in plugins if isinstance(plugin, dict))
    with one_at_a_time() if backend == "xla" else contextlib.nullcontext():
        torch.manual_seed(0)
        model = llama() if sharded else Bigrams()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    planted = accelerator.run.state(plant)
    skipped, rates = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, batch in enumerate(token_batches(steps * accumulation)):
            step, is_first = number // accumulation + 1, number % accumulation == 0
            if step == left_out:
                continue
            fault = step == at and is_first and accelerator.run.backend.rank == 1
            if planted:
                planted["armed"] = fault and not loss
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            with accelerator.accumulate(model):
                value = model(**batch).loss
                accelerator.backward(value * float("nan") if fault and loss else value)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients and accelerator.optimizer_step_was_skipped:
                    skipped.append(step)
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
    said = [str(w.message) for w in caught if "not finite" in str(w.message)]
    count = guards[0].skipped(accelerator.run) if guards else 0
    weights = accelerator.get_state_dict(model)
    fqn = planted.get("fqn")
    accelerator.end_training()
    return said, skipped, count, rates, {k: v.clone() for k, v in weights.items()}, fqn
