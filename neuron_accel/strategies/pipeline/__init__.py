# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules as data, models split into stages, and the runtime that executes a schedule."""
