"""What is particular to AWS Trainium: instances, compiler flags, the compile cache, the environment.

Nothing here imports torch, torch_xla or the Neuron packages: it is text, numbers and files, and works on any machine.
"""

from neuron_accel.neuron.cache import CompileCache
from neuron_accel.neuron.compiler import CompilerOptions
from neuron_accel.neuron.environment import RuntimeOptions
from neuron_accel.neuron.instances import INSTANCES, Instance, find_instance

__all__ = ["INSTANCES", "CompileCache", "CompilerOptions", "Instance", "RuntimeOptions", "find_instance"]
