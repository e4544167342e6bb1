# SPDX-License-Identifier: Apache-2.0
"""What the methods of ``NeuronAccelerator`` do: preparing objects, training steps, wrappers of optimizers and
schedulers, and collectives over values."""
