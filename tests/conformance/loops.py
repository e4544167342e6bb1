"""Training loops of the kinds that Accelerate's examples show, for any class of accelerator, on tiny data that is made
up. Each returns plain values that do not depend on what runs it."""

from __future__ import annotations

import json
import os

import torch
from torch.utils.data import DataLoader, Dataset, Subset

WORDS, CLASSES = 64, 2


class Sentences(Dataset):
    """``count`` sentences of 3 to 10 words; the class is whether most words come from the upper half."""

    def __init__(self, count, seed=0):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 11, (count,), generator=generator)
        self.sentences = [torch.randint(2, WORDS, (int(n),), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, index):
        words = self.sentences[index]
        return {"input_ids": words, "labels": int((words > WORDS // 2).float().mean() > 0.5), "index": index}


def collate(samples):
    """Padded to the longest."""
    words = [sample["input_ids"] for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=0)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(w) for w in words], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.tensor([sample["labels"] for sample in samples]),
        "index": torch.tensor([sample["index"] for sample in samples]),
    }


def classifier(family):
    """A tiny BERT, or a tiny Llama where tensors are to be sharded. Without dropout: its random numbers are those of a
    rank, and there are other ranks."""
    torch.manual_seed(7)
    common = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
              "num_attention_heads": 4, "max_position_embeddings": 32, "num_labels": CLASSES, "pad_token_id": 0,
              "initializer_range": 0.1}  # fmt: skip
    if family == "bert":
        from transformers import BertConfig, BertForSequenceClassification

        return BertForSequenceClassification(
            BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        )
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(LlamaConfig(**common, num_key_value_heads=4))


def loss_and_logits(model, batch):
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    return output.loss, output.logits


def optimizer_for(model, lr=3e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-6)


def warm_up(optimizer, steps):
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, steps // 5, steps)


def loaders(data, held_out, batch_size):
    generator = torch.Generator().manual_seed(9)
    return (
        DataLoader(data, shuffle=True, generator=generator, collate_fn=collate, batch_size=batch_size, drop_last=True),
        DataLoader(held_out, collate_fn=collate, batch_size=batch_size + 1),
    )


def evaluate(accelerator, model, loader):
    """Accuracy over all processes, and which samples were counted."""
    model.eval()
    right, seen = 0, []
    for batch in loader:
        with torch.no_grad():
            _, logits = loss_and_logits(model, batch)
        guesses, labels, index = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"], batch["index"]))
        right += int((guesses == labels).sum())
        seen += index.tolist()
    model.train()
    return right / len(seen), sorted(seen)


def weight(accelerator, model):
    """One number that depends on every weight."""
    state = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return None
    return sum(float(value.double().abs().sum()) for value in state.values() if value.is_floating_point())


def with_checkpoints(make, family, folder, interrupted):
    """Two epochs with a checkpoint in the middle of the first; interrupted there and resumed, or not."""
    from accelerate.utils import DataLoaderConfiguration, set_seed

    accelerator = make(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    batch_size = 4 // accelerator.num_processes

    def build():
        set_seed(1)
        model = classifier(family)
        optimizer = optimizer_for(model)
        train, held_out = loaders(Sentences(24), Sentences(11, seed=1), batch_size)
        schedule = warm_up(optimizer, 2 * len(train))
        return accelerator.prepare(model, optimizer, train, held_out, schedule)

    def run(prepared, epoch, batches, first, stop=None):
        model, optimizer, _, _, schedule = prepared
        model.train()
        total = 0.0
        for step, batch in enumerate(batches, first):
            loss, _ = loss_and_logits(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean").item()
            if (epoch, step) == (0, 2):
                accelerator.save_state(os.path.join(folder, f"{family}-step"))
            if stop == (epoch, step):
                break
        return total

    prepared = build()
    done = 0.0
    if interrupted:
        done = run(prepared, 0, prepared[2], 0, stop=(0, 2))
        accelerator.free_memory()
        prepared = build()
        accelerator.load_state(os.path.join(folder, f"{family}-step"))
    losses, accuracies = [], []
    for epoch in range(2):
        prepared[2].set_epoch(epoch)
        batches, first = prepared[2], 0
        if interrupted and epoch == 0:
            batches, first = accelerator.skip_first_batches(batches, 3), 3
        losses.append(run(prepared, epoch, batches, first) + (done if epoch == 0 else 0.0))
        accuracies.append(evaluate(accelerator, prepared[0], prepared[3]))
    rate = prepared[4].get_last_lr()[0]
    accelerator.wait_for_everyone()
    return losses, accuracies, rate, weight(accelerator, prepared[0])


def with_early_stopping(make, family, folder):
    """Any process may ask all of them to stop."""
    accelerator = make()
    model = classifier(family)
    optimizer = optimizer_for(model)
    train, held_out = loaders(Sentences(40), Sentences(7, seed=1), 4 // accelerator.num_processes)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
    steps, best, patience = 0, float("inf"), 0
    for _ in range(3):
        for batch in train:
            loss, _ = loss_and_logits(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            mean = accelerator.reduce(loss.detach(), "mean").item()
            best, patience = (mean, 0) if mean < best else (best, patience + 1)
            if patience == 3 and accelerator.is_last_process:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                return steps, best, evaluate(accelerator, model, held_out), weight(accelerator, model)
    raise AssertionError("never stopped")


def with_local_sgd(make, family, enabled):
    """Processes go their own way for a few steps and meet; or, not ``enabled``, stay together."""
    from accelerate.local_sgd import LocalSGD

    accelerator = make(gradient_accumulation_steps=2)
    model = classifier(family)
    optimizer = optimizer_for(model)
    train, _ = loaders(Sentences(32), Sentences(4), 2)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=enabled) as local:
        for batch in train:
            with accelerator.accumulate(model):
                loss, _ = loss_and_logits(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local.step()
    return weight(accelerator, model)


def with_cross_validation(make, family, folder):
    """A model for each of three folds; the test set is judged by all of them."""
    accelerator = make()
    batch_size, data, test = 4 // accelerator.num_processes, Sentences(24), Sentences(9, seed=3)
    accuracies, votes = [], []
    for fold in range(3):
        held_out = list(range(fold, len(data), 3))
        kept = [i for i in range(len(data)) if i % 3 != fold]
        model = classifier(family)
        optimizer = optimizer_for(model)
        train, validation = loaders(Subset(data, kept), Subset(data, held_out), batch_size)
        model, optimizer, train, validation, tests = accelerator.prepare(
            model, optimizer, train, validation, DataLoader(test, collate_fn=collate, batch_size=batch_size)
        )
        for batch in train:
            loss, _ = loss_and_logits(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accuracies.append(evaluate(accelerator, model, validation))
        logits = []
        model.eval()
        for batch in tests:
            with torch.no_grad():
                logits.append(accelerator.gather_for_metrics(loss_and_logits(model, batch)[1]))
        votes.append(torch.cat(logits))
        accelerator.free_memory()
    return accuracies, torch.stack(votes).sum(0).argmax(-1).tolist()


def with_automatic_accumulation(make, family, folder):
    """The batch that fits is found by trying; accumulation makes up for what it lacks."""
    from accelerate.utils import find_executable_batch_size

    accelerator = make()
    wanted, tried = 8 // accelerator.num_processes, []

    def halve():
        return max(1, tried[-1] // 2)

    @find_executable_batch_size(starting_batch_size=wanted, reduce_batch_size_fn=halve)
    def train(batch_size):
        tried.append(batch_size)
        accelerator.free_memory()
        model = classifier(family)
        optimizer = optimizer_for(model)
        loader, held_out = loaders(Sentences(24), Sentences(5, seed=1), batch_size)
        model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
        accelerator.gradient_accumulation_steps = wanted // batch_size
        if batch_size * accelerator.num_processes > 2:
            loss, _ = loss_and_logits(model, next(iter(loader)))
            raise RuntimeError("CUDA out of memory. It is a test.")
        steps = 0
        for batch in loader:
            with accelerator.accumulate(model):
                loss, _ = loss_and_logits(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    steps += 1
                optimizer.step()
                optimizer.zero_grad()
        return steps, evaluate(accelerator, model, held_out), weight(accelerator, model)

    return [size * accelerator.num_processes for size in tried], train()


def with_token_averages(make, family, folder):
    """Accumulation in which every word counts alike: the loss is a sum, divided by the words of all micro-batches of
    all processes."""
    accelerator = make(gradient_accumulation_steps=3)
    model = classifier(family)
    optimizer = optimizer_for(model)
    train, _ = loaders(Sentences(24), Sentences(4), 4 // accelerator.num_processes)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    batches = list(train)
    for begin in range(0, len(batches), 3):
        window = batches[begin : begin + 3]
        words = accelerator.gather(sum(batch["attention_mask"].sum() for batch in window)).sum()
        for i, batch in enumerate(window):
            is_last = i + 1 == len(window)
            with accelerator.no_sync(model) if not is_last else torch.enable_grad():
                _, logits = loss_and_logits(model, batch)
                each = torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
                loss = (each * batch["attention_mask"].sum(-1)).sum() / words
                accelerator.backward(loss * accelerator.num_processes * accelerator.gradient_accumulation_steps)
        accelerator.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return weight(accelerator, model)


def with_tracking(make, family, folder):
    """Everything that a tracker gets, from the main process only."""
    from accelerate.tracking import GeneralTracker, on_main_process

    class Lines(GeneralTracker):
        name, requires_logging_directory = "lines", False

        def __init__(self, path):
            super().__init__()
            self.path = path

        @property
        def tracker(self):
            return self.path

        def _write(self, values):
            with open(self.path, "a") as file:
                file.write(json.dumps(values) + "\n")

        @on_main_process
        def store_init_configuration(self, values):
            self._write(values)

        @on_main_process
        def log(self, values, step=None, **kwargs):
            self._write({"step": step, **{name: round(value, 4) for name, value in values.items()}})

        @on_main_process
        def finish(self):
            self._write({"end": True})

    path = os.path.join(folder, f"{family}.jsonl")
    accelerator = make(log_with=Lines(path))
    accelerator.init_trackers("example", {"lr": 3e-3})
    model = classifier(family)
    optimizer = optimizer_for(model)
    train, held_out = loaders(Sentences(16), Sentences(5, seed=1), 4 // accelerator.num_processes)
    model, optimizer, train, held_out = accelerator.prepare(model, optimizer, train, held_out)
    for epoch in range(2):
        total = torch.zeros(())
        for batch in train:
            loss, _ = loss_and_logits(model, batch)
            total += accelerator.reduce(loss.detach(), "mean")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accuracy, _ = evaluate(accelerator, model, held_out)
        accelerator.log({"accuracy": accuracy, "loss": total.item() / len(train)}, step=epoch)
    # Before the process group is destroyed: a DistributedDataParallel that is the last to hold it waits for gloo's
    # threads in its destructor, and they may wait for the interpreter that it holds (PyTorch issue 56297).
    model, optimizer, train, held_out = accelerator.free_memory(model, optimizer, train, held_out)
    accelerator.end_training()  # the last of all loops: the process is disconnected after it
    if accelerator.is_main_process:
        with open(path) as file:
            return [json.loads(line) for line in file]
    return None


LOOPS = (with_early_stopping, with_cross_validation, with_automatic_accumulation, with_token_averages)
