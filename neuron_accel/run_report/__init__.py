# SPDX-License-Identifier: Apache-2.0
"""The files of a run report: their contents, reading them, and the pages and traces made from them. Without torch."""
