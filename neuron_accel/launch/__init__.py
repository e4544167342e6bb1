# SPDX-License-Identifier: Apache-2.0
"""Ranks on one machine or several, started and supervised by the elastic agent of torch."""
