# SPDX-License-Identifier: Apache-2.0
"""What to do: one package for each strategy."""
