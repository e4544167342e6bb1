"""An emulated Neuron device: torch_xla's own NEURON path over XLA's CPU. See :mod:`neuron_accel.testing.neuron_ranks`.

``device.c`` is the plugin that torch_xla loads, ``broker.c`` the process that executes for all ranks, ``wire.h`` what
the two say to each other. They are built when they are first needed.
"""
