"""Imported once, by the process that ranks are forked from, so that every rank starts with warm imports.

That process only imports: it starts no threads, opens no process group and touches no device, because forked ranks
would inherit what it started. A module that cannot be imported is left to the rank that needs it, which then shows the
error.
"""

from __future__ import annotations

import contextlib
import importlib
import os

MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "accelerate",
    "accelerate.accelerator",
    "accelerate.data_loader",
    "pytest",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "neuron_accel.testing._rank",
    "neuron_accel.backends.torch_distributed",
    "neuron_accel.backends.autograd",
    "neuron_accel.engine.plan.plan",
    "neuron_accel.engine.runtime.run",
    "neuron_accel.accelerator",
    "neuron_accel.strategies.data_parallel.plugin",
    "neuron_accel.strategies.zero1",
    "neuron_accel.strategies.model_parallelism.plugin",
    "neuron_accel.strategies.sequence_parallel.plugin",
)

# Thread pools are sized when the libraries are loaded: one thread per rank, or ranks fight over the cores.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"

with contextlib.suppress(Exception):
    from neuron_accel.backends.select import settle

    settle(os.environ)

for _name in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
