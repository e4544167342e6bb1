# SPDX-License-Identifier: Apache-2.0
"""The sources of an emulated Neuron device, see :mod:`neuron_accel.testing.neuron_ranks`.

``device.c`` is the PJRT plugin that torch_xla loads, ``broker.c`` the process that executes programs for all ranks, and
``wire.h`` the protocol between them. They are compiled when they are first needed.
"""
