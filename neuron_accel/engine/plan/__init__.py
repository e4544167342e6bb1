# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: mesh, plugins, their order and responsibilities, read from a configuration and explained. Pure."""
