"""The process that XLA ranks are forked from: ``python -m neuron_accel.testing._xla_server``.

Ranks of an emulated Neuron device are forked by :mod:`neuron_accel.testing._neuron_server` in the same way.

It imports what ranks need, once, and touches no device. For each folder that it reads a line with, it forks a process,
answers ``pid N``, and, when that has ended, ``exit CODE``. It ends with its input.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

MODULES = (
    "torch_xla",
    "torch_xla.core.xla_model",
    "torch_xla.debug.metrics",
    "torch_xla.runtime",
    "torch_xla._internal.pjrt",
    "torch_xla.distributed.zero_redundancy_optimizer",
    "accelerate.data_loader",
    "datasets",
    "pytest",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "neuron_accel.accelerator",
    "neuron_accel.backends.xla",
    "neuron_accel.strategies.data_parallel.plugin",
    "neuron_accel.strategies.zero1",
    "neuron_accel.strategies.model_parallelism.plugin",
    "neuron_accel.strategies.sequence_parallel.plugin",
    "neuron_accel.testing._xla_process",
)


def serve(main: str) -> None:
    """Forks a process for each line, in which the function ``main`` of the module of that name takes over."""
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow: no thread before a fork
    for name in MODULES:
        with contextlib.suppress(ImportError):  # shown by the rank that needs it
            importlib.import_module(name)
    take_over = importlib.import_module(main).main
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            take_over(line.strip())
        print("pid", pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print("exit", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve("neuron_accel.testing._xla_process")
