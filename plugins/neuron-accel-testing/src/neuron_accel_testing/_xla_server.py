# SPDX-License-Identifier: Apache-2.0
"""The process from which XLA ranks are forked: ``python -m neuron_accel.testing._xla_server``.

Packages that add ranks of torch_xla on another device call :func:`serve` with a module of their own.

It imports the modules that ranks need, and initialises no device. For each line of its input, the path of a folder with
a task, it forks a process, prints ``pid N``, and ``exit CODE`` when that process has ended. It ends at the end of its
input.
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
    """Forks a process for each line of the input.

    Args:
        main: name of the module whose function ``main`` the process calls with the line.
    """
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow starts no thread
    for name in MODULES:
        with contextlib.suppress(ImportError):  # the rank that needs it raises the error
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
