"""Training programs that ranks of an emulated Neuron device run."""

from __future__ import annotations

import torch

from tests.distributed.models import MODELS, token_batches

SAMPLES, BATCH, STEPS = 20, 2, 4


class Texts(torch.utils.data.Dataset):
    """A dataset with the given number of rows of tokens."""

    def __init__(self, count):
        self.rows = token_batches(count, size=1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {name: value[0] for name, value in self.rows[index].items()}


def finetune(plugins, model="llama", *, accumulation=1, folder=None, resume=False, epochs=2):
    """A training as people write it: batches of which the last is ragged, a schedule, clipping, logging, a look at the
    loss every other step, evaluation after each epoch, a checkpoint of the first epoch, and the model at the end.

    Args:
        folder: where the checkpoint and the model go.
        resume: begin with the checkpoint.
    """
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins, "gradient_accumulation_steps": accumulation})
    torch.manual_seed(0)
    model = MODELS[model]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(Texts(SAMPLES), batch_size=BATCH, shuffle=True)
    evaluation = torch.utils.data.DataLoader(Texts(SAMPLES // 2 + 1), batch_size=BATCH)
    model, optimizer, loader, evaluation, schedule = accelerator.prepare(model, optimizer, loader, evaluation, schedule)
    if resume:
        accelerator.load_state(f"{folder}/state")
    losses = []
    for epoch in range(epochs):
        model.train()
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean"), "rate": schedule.get_last_lr()[0]})
            if index % 2 == 0:
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
        model.eval()
        for batch in evaluation:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(BATCH)).mean().item())
        if epoch == 0 and not resume and folder:
            accelerator.save_state(f"{folder}/state")
    if folder:
        accelerator.save_model(model, f"{folder}/model")
    accelerator.end_training()
    return losses
