"""Imported once, by the process that ranks are forked from, so that every rank starts with warm imports.

That process only imports: it starts no threads, opens no process group and touches no device, because forked ranks
would inherit what it started. Pyarrow, which datasets imports, would start one, which an option prevents. A module that
cannot be imported is left to the rank that needs it, which then shows the error.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "accelerate",
    "accelerate.accelerator",
    "accelerate.data_loader",
    "datasets",  # which Accelerate imports to look at a loader, where it is installed: most of what a small case takes
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
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looking for GPUs starts no CUDA, which a fork would not survive
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

with contextlib.suppress(Exception):
    from neuron_accel.backends.select import settle

    settle(os.environ)

for _name in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

# Ranks share these objects' pages until they are written to, which a collection does, and so does the one at exit.
gc.collect()
gc.freeze()
