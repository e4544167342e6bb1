"""Trains a small Llama with Ray Train; if a node is lost, training goes on with those that are left.

python train.py --storage /shared/runs --workers 2                    as many workers as that
python train.py --storage /shared/runs --workers 2 --min_workers 1    as many as there is room for, up to that
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchTrainer


def train(options: dict[str, Any]) -> None:
    """What each worker does, in each start of the group."""
    import torch
    from accelerate.utils import ProjectConfiguration
    from transformers import LlamaConfig, LlamaForCausalLM

    from neuron_accel import NeuronAccelerator

    os.environ["NEURON_ACCEL_RUN"] = options["name"]  # so that what a lost node was saving can be saved again at once
    project = ProjectConfiguration(project_dir=options["folder"], automatic_checkpoint_naming=True)
    accelerator = NeuronAccelerator(project_config=project, config={"plugins": ["zero1"]})
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    texts = torch.randint(256, (options["samples"], 32), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(texts, batch_size=options["micro_batch_size"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.load_state(resume="latest", keep_batch=True)  # the same samples in a step on any number of workers

    losses, steps = [], 0
    while loader.iteration < options["epochs"]:
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            steps += accelerator.sync_gradients
            if steps == options["save_every"]:
                mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                folder = accelerator.save_state()  # workers write their parts to the storage; Ray only registers it
                metrics = {
                    "step": accelerator.save_iteration * steps,
                    "loss": mean,
                    "workers": accelerator.num_processes,
                }
                checkpoint = ray.train.Checkpoint(folder) if accelerator.is_main_process else None
                upload = ray.train.CheckpointUploadMode.NO_UPLOAD
                ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=upload)
                losses, steps = [], 0
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--name", default="llama", help="of the run: its folder in the storage (default: llama)")
    parser.add_argument("--workers", type=int, default=2, help="ranks, each with a CPU (default: 2)")
    parser.add_argument("--min_workers", type=int, help="with how many to go on (default: all of them)")
    parser.add_argument("--max_failures", type=int, default=3, help="how often to start again (default: 3)")
    parser.add_argument("--samples", type=int, default=512, help="texts (default: 512)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over them (default: 1)")
    parser.add_argument("--micro_batch_size", type=int, default=4, help="texts of a micro-batch (default: 4)")
    parser.add_argument("--save_every", type=int, default=8, help="steps from one checkpoint to the next (default: 8)")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints to keep (default: 2)")
    options = parser.parse_args()
    storage = options.storage.absolute()
    workers = (options.min_workers, options.workers) if options.min_workers else options.workers
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(options), "folder": str(storage / options.name)},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name=options.name,
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(max_failures=options.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=options.keep),
        ),
    )
    result = trainer.fit()
    for checkpoint, metrics in result.best_checkpoints:
        print(json.dumps({**metrics, "checkpoint": checkpoint.path}))


if __name__ == "__main__":
    main()
