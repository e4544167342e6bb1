# SPDX-License-Identifier: Apache-2.0
"""Support for AWS Trainium: instances, compiler flags, the compile cache, environment variables.

These modules import neither torch nor torch_xla nor the Neuron packages, and work on any machine.
"""

from neuron_accel.neuron.cache import CompileCache
from neuron_accel.neuron.compiler import CompilerOptions
from neuron_accel.neuron.environment import RuntimeOptions
from neuron_accel.neuron.instances import INSTANCES, Instance, find_instance

__all__ = ["INSTANCES", "CompileCache", "CompilerOptions", "Instance", "RuntimeOptions", "find_instance"]
