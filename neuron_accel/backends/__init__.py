# SPDX-License-Identifier: Apache-2.0
"""How collectives and devices are done: one small interface, several implementations."""
