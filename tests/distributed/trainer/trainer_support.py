"""A tiny training that transformers' own Trainer does in one process, and ours on several ranks."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import numpy as np
import torch

from tests.distributed.models import VOCABULARY, llama

SAMPLES, LENGTH, GLOBAL_BATCH = 22, 12, 4


class Texts(torch.utils.data.Dataset):
    """Random tokens; every sample has another number of them that count."""

    def __init__(self, samples=SAMPLES, seed=0, packed=False):
        self.packed = packed
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = self.ids[index].clone()
        labels[: index % (LENGTH - 2)] = -100
        sample = {"input_ids": self.ids[index], "labels": labels}
        if self.packed:
            first = torch.arange(LENGTH // 3)
            sample["position_ids"] = torch.cat([first, torch.arange(LENGTH - len(first))])
        return sample


def model():
    torch.manual_seed(0)
    return llama()


def accuracy(prediction):
    predicted, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((predicted == labels)[counted].mean()), "counted": int(counted.sum())}


def options(folder, ranks_with_data=1, **more):
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": GLOBAL_BATCH // ranks_with_data,
        "per_device_eval_batch_size": GLOBAL_BATCH // ranks_with_data,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    } | more


def squared_logits(outputs, labels, num_items_in_batch=None):
    """A loss of one's own, normalised as asked."""
    shifted, targets = outputs["logits"][:, :-1], labels[:, 1:]
    counted = targets != -100
    picked = shifted.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((1 - picked) ** 2 * counted).sum() / num_items_in_batch


def stopper(step):
    """A callback that ends a training early, as an interruption would."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step >= step

    return Stop()


def signaller(step):
    """A callback that sends SIGTERM to rank 1, as a scheduler or the provider of a machine would."""
    import torch.distributed as dist
    from transformers import TrainerCallback

    class Signal(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == step and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    return Signal()


def callbacks(more):
    """Those that ``more`` asks for."""
    from transformers import EarlyStoppingCallback

    result = [stopper(more.pop("stop_after"))] if "stop_after" in more else []
    result += [signaller(more.pop("signal_at"))] if "signal_at" in more else []
    return result + ([EarlyStoppingCallback(more.pop("early_stopping"))] if "early_stopping" in more else [])


def facts(trainer, state, result=None):
    """What two trainings must agree in."""
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
        "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
        "evaluations": [
            {k: v for k, v in entry.items() if k in ("eval_loss", "eval_accuracy", "eval_counted")}
            for entry in history
            if "eval_loss" in entry
        ],
        "train_loss": result.training_loss if result is not None else None,
        "steps": trainer.state.global_step,
        "best": (trainer.state.best_global_step, Path(trainer.state.best_model_checkpoint or "").name),
        "weights": state,
    }


def train_with_stock(folder, ranks_with_data=1, **more):
    """transformers' own Trainer, in one process or, on several ranks, by torch's data parallelism."""
    from transformers import Trainer, TrainingArguments

    data = Texts(packed=more.pop("packed", False))
    extra = {"compute_loss_func": more.pop("compute_loss_func", None), "callbacks": callbacks(more)}
    trainer = Trainer(
        model=model(),
        args=TrainingArguments(**options(folder, ranks_with_data, **more)),
        train_dataset=data,
        eval_dataset=Texts(10, seed=1),
        compute_metrics=accuracy,
        **extra,
    )
    result = trainer.train()
    return facts(trainer, {k: v.clone() for k, v in trainer.model.state_dict().items()}, result)


def train_on_rank(folder, ranks_with_data, more, extra=None, resume=None):
    """Ours on this rank."""
    from neuron_accel.trainer import NeuronTrainer, NeuronTrainingArguments

    more, extra = dict(more), dict(extra or {})
    extra["callbacks"] = callbacks(more)
    data = Texts(packed=more.pop("packed", False))
    trainer = NeuronTrainer(
        model=model(),
        args=NeuronTrainingArguments(**options(folder, ranks_with_data, **more)),
        train_dataset=data,
        eval_dataset=Texts(10, seed=1),
        compute_metrics=accuracy,
        **extra,
    )
    result = trainer.train(resume_from_checkpoint=resume)
    return facts(trainer, trainer.accelerator.get_state_dict(trainer.model_wrapped), result)


def assert_same(mine, theirs, tolerance=2e-4, atol=0.0):
    assert mine["steps"] == theirs["steps"]
    for name in ("losses", "norms", "rates"):
        np.testing.assert_allclose(mine[name], theirs[name], rtol=tolerance, atol=atol, err_msg=name)
    assert len(mine["evaluations"]) == len(theirs["evaluations"])
    for ours, others in zip(mine["evaluations"], theirs["evaluations"], strict=True):
        assert ours.keys() == others.keys()
        for name in ours:
            assert math.isclose(ours[name], others[name], rel_tol=tolerance), (name, ours, others)
    if theirs["train_loss"] is not None and mine["train_loss"] is not None:
        assert math.isclose(mine["train_loss"], theirs["train_loss"], rel_tol=tolerance, abs_tol=atol)
    if mine["weights"]:
        for name, value in theirs["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: n + m)
