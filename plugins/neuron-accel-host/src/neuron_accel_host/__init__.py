# SPDX-License-Identifier: Apache-2.0
"""``host``, a backend of ``torch.distributed`` for CPU ranks of one host: tensors pass through shared memory.

Importing this package registers it::

    import neuron_accel_host
    import torch.distributed as dist

    dist.init_process_group("host")

Groups whose ranks do not share a host are groups of gloo.
"""

from __future__ import annotations

import torch.distributed as dist

from neuron_accel_host.group import NAME, HostGroup, connect

__all__ = ["NAME", "HostGroup"]
__version__ = "0.1.0"

dist.Backend.register_backend(NAME, connect, extended_api=True, devices=["cpu"])
