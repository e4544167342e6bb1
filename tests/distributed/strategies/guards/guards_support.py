"""Trainings with guards, clean and with a planted fault; run inside ranks of either backend."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from types import SimpleNamespace

import torch

from tests.distributed.models import MODELS, VOCABULARY, token_batches

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}


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
    from neuron_accel.testing.xla_ranks import one_at_a_time

    config = {"plugins": [*plugins, *guards], "gradient_accumulation_steps": accumulation}
    accelerator = NeuronAccelerator(config=config | ({"backend": backend} if backend else {}))
    with one_at_a_time() if backend == "xla" else contextlib.nullcontext():
        torch.manual_seed(0)
        model = MODELS["llama"]() if TP2 in plugins else Bigrams()
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
