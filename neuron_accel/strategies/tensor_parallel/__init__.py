"""Tensor parallelism: each rank of an axis holds a shard of every large weight and computes with it.

Method: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019),
and Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022) for sequence parallelism.

How the files go together: ``plugin`` is the strategy; ``shard_plan`` decides, without touching the model, which
``tp_region`` is how activations enter and leave the regions in which ranks compute different results, and ``regions``
attaches it to a model.
attaches it to a model.
"""
