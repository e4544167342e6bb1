# SPDX-License-Identifier: Apache-2.0
"""Imports modules that ranks need in the process from which they are forked, so that ranks do not import them again.

That process starts no threads, creates no process group and initialises no device, since forked ranks would inherit
them. An option keeps pyarrow, which datasets imports, from starting a thread. If a module cannot be imported, the rank
that needs it raises the error.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "accelerate",
    "accelerate.accelerator",
    "accelerate.data_loader",
    "datasets",  # Accelerate imports it, if installed, for loaders, which takes most of the time of a small case
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

# Thread pools are sized when the libraries are loaded; each rank gets one thread.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else looking for GPUs initialises CUDA
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

with contextlib.suppress(Exception):
    from neuron_accel.backends.select import settle

    settle(os.environ)

for _name in MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_name)

with contextlib.suppress(Exception):
    from neuron_accel.doors import installed

    installed(tuple(sys.path))

with contextlib.suppress(Exception):
    from neuron_accel.backends.process_group import installed_library

    installed_library()

# Keeps the garbage collector from writing to the memory pages of these objects, which ranks share until then.
gc.collect()
gc.freeze()
