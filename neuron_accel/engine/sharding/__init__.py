# SPDX-License-Identifier: Apache-2.0
"""Layouts: how the parameters of the original model are sharded on this rank."""
