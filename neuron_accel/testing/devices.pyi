# SPDX-License-Identifier: Apache-2.0
# For type checkers: the module is in the package neuron-accel-testing.
from neuron_accel_testing._call import pickle_call as pickle_call
from neuron_accel_testing._device_group import DeviceGroup as DeviceGroup
from neuron_accel_testing._device_group import Work as Work
from neuron_accel_testing._device_group import bits as bits
from neuron_accel_testing._device_group import nothing as nothing
from neuron_accel_testing._rank import STACK_SIGNAL as STACK_SIGNAL
from neuron_accel_testing._rank import pickle_error as pickle_error
from neuron_accel_testing._xla_process import XlaTask as XlaTask
from neuron_accel_testing._xla_process import enter_task as enter_task
from neuron_accel_testing._xla_process import import_script as import_script
from neuron_accel_testing._xla_server import serve as serve
from neuron_accel_testing.devices import RankDevice as RankDevice
from neuron_accel_testing.devices import RankMachine as RankMachine
from neuron_accel_testing.xla_ranks import run_forked as run_forked
