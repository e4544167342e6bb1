"""Runs a training script of another project, unmodified, on this rank, with ``Accelerator`` and ``Seq2SeqTrainer``
replaced, and records what it trains: ``python -m tests.sweeps.script_runs.rank SCRIPT [its arguments]``.

The environment variable ``SCRIPT_RUN`` has the plugins (null: Accelerate's own class, so that the script runs as its
authors know it) and the folder of the records, as JSON.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import types
import wave
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    options = json.loads(os.environ["SCRIPT_RUN"])
    rank = int(os.environ["RANK"])
    stand_in_for_what_needs_a_network(Path(sys.argv[1]).read_text())
    swap(options["plugins"], Path(options["records"]), rank)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    torch.manual_seed(rank)  # as without a seed: each process draws its own numbers, and repeatably
    runpy.run_path(sys.argv[0], run_name="__main__")


def swap(plugins: list[Any] | None, records: Path, rank: int) -> None:
    """Puts the classes in the places from which scripts import them."""
    if plugins is None:
        import accelerate

        base: Any = accelerate.Accelerator
    else:
        from neuron_accel import NeuronAccelerator as base  # before accelerate: it settles the backend

        import accelerate  # isort: skip

        from tests.sweeps.script_runs.trainer import Arguments, Trainer

        transformers: Any = sys.modules["transformers"]  # another object than before its first class was imported
        transformers.Seq2SeqTrainingArguments, transformers.Seq2SeqTrainer = Arguments, Trainer
    accelerate.Accelerator = recorded(base, {} if plugins is None else {"config": {"plugins": plugins}}, records, rank)


def recorded(base: Any, options: dict[str, Any], records: Path, rank: int) -> Any:
    """The class, which records losses and what is logged, and at the end the weights."""
    losses: list[float] = []
    logged: list[dict[str, float]] = []

    class Recorded(base):
        def __init__(self, *arguments: Any, **given: Any) -> None:
            super().__init__(*arguments, **{**options, **given})

        def backward(self, loss: torch.Tensor, **given: Any) -> None:
            losses.append(loss.item())
            super().backward(loss, **given)

        def log(self, values: dict[str, Any], *arguments: Any, **given: Any) -> None:
            logged.append({name: float(value) for name, value in values.items() if isinstance(value, (int, float))})
            super().log(values, *arguments, **given)

        def end_training(self) -> None:
            from safetensors.torch import save_file

            for number, model in enumerate(self._models):
                weights = self.get_state_dict(model)
                if self.is_main_process:
                    whole = {name: value.contiguous().clone() for name, value in weights.items()}
                    save_file(whole, records / f"model-{number}.safetensors")
            (records / f"rank-{rank}.json").write_text(json.dumps({"losses": losses, "logged": logged}))
            super().end_training()

    Recorded.__name__ = base.__name__
    return Recorded


# ---- what scripts load from a hub, and kernels that they do not call -------------------------------------------------
def stand_in_for_what_needs_a_network(script: str = "") -> None:
    for kernel in ("nms", "qnms"):  # a torchvision that was built for a CUDA build of torch lacks them in a CPU build
        if not hasattr(torch.ops.torchvision, kernel) and torch.version.cuda is None:
            torch.library.define(f"torchvision::{kernel}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    sys.modules["evaluate"] = types.ModuleType("evaluate")
    sys.modules["evaluate"].load = Metric  # type: ignore[attr-defined]
    if "timm" in script:
        import timm

        create = timm.create_model
        timm.create_model = lambda name, pretrained=False, **options: create("test_resnet", **options)
    if "features.Audio" in script:
        from datasets import Audio

        Audio.encode_example, Audio.decode_example = name_of_file, read_wave


class Metric:
    """The share of predictions that are equal to their reference, under each name by which scripts read it."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name = name
        self.equal: list[bool] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        for found, expected in zip(predictions, references, strict=True):
            self.equal.append(bool(found == (expected[0] if isinstance(expected, list) else expected)))

    def compute(self, predictions: Any = (), references: Any = ()) -> Any:
        self.add_batch(predictions, references)
        share, self.equal = sum(self.equal) / len(self.equal), []
        return share if self.name == "wer" else {"score": share, "accuracy": share}


def name_of_file(self: Any, value: Any) -> dict[str, Any]:
    return {"bytes": None, "path": value if isinstance(value, str) else value["path"]}


def read_wave(self: Any, value: dict[str, Any], **options: Any) -> dict[str, Any]:
    """In the place of torchcodec, which decodes every format."""
    with wave.open(value["path"]) as file:
        samples = torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16)
        return {"array": (samples / 32768).numpy(), "sampling_rate": file.getframerate()}


if __name__ == "__main__":
    main()
