# SPDX-License-Identifier: Apache-2.0
"""The engine: the plan, the sharding of tensors, the state of a run, and what optimizers and reducers share."""
