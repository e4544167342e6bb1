# SPDX-License-Identifier: Apache-2.0
"""The state of one run, and operations on tensors of several ranks."""
