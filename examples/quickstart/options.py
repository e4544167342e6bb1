"""The options of the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VERIFIED = (
    "largest relative difference of losses that --verify accepts; ten times as much for gradient norms, a hundred "
    "times for weights, relative to what training changed in them"
)
EXAMPLES = """\
examples:
  4 ranks, sharded as train.yaml says:
    neuron-accel launch --nproc-per-node 4 examples/quickstart/train.py
  the same, compared with the same training in one process:
    neuron-accel launch --nproc-per-node 4 examples/quickstart/train.py --verify
  2 ranks, with torchrun, data parallel:
    torchrun --nproc-per-node 2 examples/quickstart/train.py --config examples/quickstart/data_parallel.yaml
"""


def parse(description: str, arguments: list[str] | None = None) -> argparse.Namespace:
    """The options in ``arguments``, or of this process; ends it with a message if they are not valid."""
    parser = argparse.ArgumentParser(description=description, epilog=EXAMPLES, formatter_class=_HelpFormatter)
    option = parser.add_argument
    option("--config", type=Path, default=HERE / "train.yaml", help="YAML file: precision, accumulation and strategies")
    option("--output", type=Path, default=Path("out/quickstart"), help="folder for corpus, trained model and history")
    option("--seed", type=int, default=0, help="of first weights and order of the data; same seed, same losses")
    option("--verify", action="store_true", help="also train in one process on the same batches and compare losses")
    option("--tolerance", type=_positive(float), default=1e-4, help=VERIFIED)
    option("--prompt", default="def __init__(self,", help="beginning of a line of Python for the model to complete")

    option = parser.add_argument_group("training").add_argument
    option("--steps", type=_positive(int), default=240, help="optimizer steps")
    option("--batch-size", type=_positive(int), default=8, help="sequences in an optimizer step, over all ranks")
    option("--learning-rate", type=_positive(float), default=2e-3, help="highest learning rate of AdamW")
    option("--eval-batches", type=_positive(int), default=16, help="batches of held-out text at the end, at most")
    option(
        "--log-every", type=_positive(int), default=5, help="optimizer steps between two updates of the progress bar"
    )

    option = parser.add_argument_group("model").add_argument
    option("--hidden-size", type=_positive(int), default=256, help="width of the model")
    option("--layers", type=_positive(int), default=2, help="number of decoder layers")
    option("--heads", type=_positive(int), default=8, help="number of attention heads")
    option("--key-value-heads", type=_positive(int), default=4, help="number of key and value heads")

    option = parser.add_argument_group("text").add_argument
    option("--corpus-share", type=_positive(float), default=0.4, help="fraction of the standard library's files to use")
    option(
        "--held-out-share", type=_positive(float), default=0.05, help="fraction of these that is kept for evaluation"
    )
    option("--vocab-size", type=_positive(int), default=2048, help="tokens of the byte-level BPE tokenizer")
    option("--sequence-length", type=_positive(int), default=128, help="tokens in a sequence")

    options = parser.parse_args(arguments)
    if options.hidden_size % (2 * options.heads):
        parser.error(f"--hidden-size {options.hidden_size} must be a multiple of twice --heads {options.heads}")
    if options.heads % options.key_value_heads:
        parser.error(f"--heads {options.heads} must be a multiple of --key-value-heads {options.key_value_heads}")
    return options


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and leaves the lines of description and examples as they are."""


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    convert.__name__ = kind.__name__  # what argparse says was expected where the text is no number at all
    return convert
