# SPDX-License-Identifier: Apache-2.0
"""The command ``neuron-accel``. Importing its modules is cheap: only functions that need torch import it."""
