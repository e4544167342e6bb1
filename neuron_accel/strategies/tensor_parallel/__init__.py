# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: each rank of an axis holds a shard of every large weight and computes with it.

Method: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019),
and Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022) for sequence parallelism.

``plugin`` is the strategy. ``shard_plan`` decides how each parameter is sharded, without changing the model, and
``rewrite`` carries that out. ``tp_region`` defines how activations enter and leave the regions in which ranks compute
different results, and ``regions`` installs it in a model.
"""
