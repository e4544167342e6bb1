# SPDX-License-Identifier: Apache-2.0
"""The files of run reports, which are read by the package neuron-accel-report."""
