"""The output of a run: a progress bar during training; a table, a chart and a line of code at the end."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

if TYPE_CHECKING:
    from neuron_accel import NeuronAccelerator

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.,-=+*#"


def progress_bar(description: str, batches: Iterable[Any] | None = None, *, total: int, show: bool = True) -> tqdm:
    """A bar on stderr, around ``batches`` or to be moved by hand."""
    return tqdm(
        batches,
        desc=description,
        total=total,
        unit="step",
        disable=not show,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,  # fewer updates in a log file
        bar_format="{desc} {percentage:3.0f}% |{bar:24}| {n_fmt}/{total_fmt} [{elapsed}, eta {remaining}{postfix}]",
    )


class Progress:
    """Collects the losses of a run and shows them in a bar on the main process.

    Reading a loss makes the host wait for the device, and averaging it is a collective; both happen once in a number of
    steps only.

    Args:
        accelerator: of the run.
        steps: number of optimizer steps.
        tokens_per_step: over all ranks.
        every: optimizer steps between two readings.

    Attributes:
        losses: mean loss of every optimizer step, over micro-batches and ranks.
        norms: global norm of the gradients before clipping, of every optimizer step.
    """

    def __init__(self, accelerator: NeuronAccelerator, *, steps: int, tokens_per_step: int, every: int) -> None:
        self._accelerator, self._tokens_per_step, self._every = accelerator, tokens_per_step, every
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._micro_batches: list[torch.Tensor] = []
        self._unread: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bar = progress_bar("training", total=steps, show=accelerator.is_main_process)
        self._start = time.monotonic()

    def micro_batch(self, loss: torch.Tensor) -> None:
        """Records a micro-batch; ``loss`` is the mean loss of this rank."""
        self._micro_batches.append(loss.detach())

    def step(self, norm: torch.Tensor) -> None:
        """Records an update of the weights."""
        self._unread.append((torch.stack(self._micro_batches).mean(), norm.detach()))
        self._micro_batches.clear()
        if len(self._unread) == self._every:
            self._read()

    def close(self) -> float:
        """Reads the remaining losses and returns the seconds since the start."""
        self._read()
        self._bar.close()
        return time.monotonic() - self._start

    def _read(self) -> None:
        if not self._unread:
            return
        losses, norms = (torch.stack(values) for values in zip(*self._unread, strict=True))
        self.losses += self._accelerator.reduce(losses, "mean").tolist()
        self.norms += norms.tolist()
        rate = len(self.losses) * self._tokens_per_step / (time.monotonic() - self._start)
        self._bar.set_postfix_str(f"loss {self.losses[-1]:.3f}, {rate:,.0f} tokens/s", refresh=False)
        self._bar.update(len(self._unread))
        self._unread.clear()


def loss_table(losses: Sequence[float], reference: Sequence[float] | None = None, *, rows: int = 12) -> str:
    """Losses at evenly spaced steps, the first and the last among them; beside them the reference's, if there is one.

    Args:
        losses: of the sharded run, one a step.
        reference: of the one-process run, for the same steps.
        rows: number of lines at most.
    """
    count = min(rows, len(losses))
    chosen = [round(i * (len(losses) - 1) / max(count - 1, 1)) for i in range(count)]
    if reference is None:
        return "\n".join([" step      loss", *(f"{i + 1:5d} {losses[i]:9.5f}" for i in chosen)])
    lines = [" step   sharded  one process  relative difference"]
    relative = [(a - b) / b for a, b in zip(losses, reference, strict=True)]
    lines += [f"{i + 1:5d} {losses[i]:9.5f} {reference[i]:12.5f} {relative[i]:20.1e}" for i in chosen]
    return "\n".join(lines)


def verdict(difference: float, limit: float, what: str = "") -> bool:
    """Prints a difference, and returns whether it is within its limit."""
    within = difference <= limit
    print(f"{what}{difference:.1e} ({'within' if within else 'ABOVE'} the tolerance of {limit:.0e})")
    return within


def about_weights(difference: float, tensor: str) -> str:
    """Prints the largest difference of a single weight, which has no limit."""
    return (
        f"The single weight that differs most, by {difference:.1e} of the largest one beside it, is in {tensor}.\n"
        "AdamW divides each gradient by its own size; where one is as small as the rounding of sums (those of rare\n"
        "tokens), rounding decides about a whole update. Two runs of one process whose first weights differ in the\n"
        "seventh digit come about as far apart."
    )


def sparkline(values: Sequence[float], *, width: int = 60, encoding: str | None = None) -> str:
    """The course of ``values`` in one line of text: bars between the smallest and the largest, each the mean of equally
    many neighbours.

    Args:
        values: what to draw.
        width: characters at most.
        encoding: of the output; without block characters in it, ASCII is used. That of stdout by default.
    """
    try:
        _BLOCKS.encode(encoding or sys.stdout.encoding or "ascii")
        bars = _BLOCKS
    except UnicodeEncodeError:
        bars = _ASCII
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(bars[round((m - low) / (high - low) * (len(bars) - 1)) if high > low else 0] for m in means)


def complete_line(folder: Path, prompt: str, *, tokens: int = 32) -> str:
    """Opens a saved folder with plain transformers and lets the model finish the line that ``prompt`` begins.

    The continuation is the likeliest that a beam search finds and that repeats no three tokens, which so small a model
    is fond of. A prompt as long as the sequences that the model knows comes back as it is.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    # A document begins where the one before it ends.
    inputs = torch.tensor([[tokenizer.eos_token_id, *tokenizer(prompt)["input_ids"]]])
    room = model.config.max_position_embeddings - inputs.shape[1]
    if room < 1:
        return prompt
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=min(tokens, room),
        do_sample=False,
        num_beams=4,
        no_repeat_ngram_size=3,
        pad_token_id=tokenizer.eos_token_id,
    )
    continuation = tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)
    return prompt + continuation.split("\n", 1)[0]
