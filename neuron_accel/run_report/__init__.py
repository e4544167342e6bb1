# SPDX-License-Identifier: Apache-2.0
"""The files of a run report: what they contain, how they are read, and what is made of them. No torch."""
