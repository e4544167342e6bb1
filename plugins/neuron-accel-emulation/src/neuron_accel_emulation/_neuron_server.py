# SPDX-License-Identifier: Apache-2.0
"""The process from which ranks of an emulated Neuron device are forked.

Run with ``python -m neuron_accel_emulation._neuron_server``. It differs from the process for XLA ranks in its
environment only, in which torch_xla finds a Neuron plugin.
"""

from __future__ import annotations

from neuron_accel.testing.devices import serve

if __name__ == "__main__":
    serve("neuron_accel_emulation._neuron_process")
