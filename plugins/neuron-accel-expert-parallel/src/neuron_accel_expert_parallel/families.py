# SPDX-License-Identifier: Apache-2.0
"""Where the experts of a model are, as data: names of modules by family.

A module of experts holds the parameters of all of them, stacked along dim 0, says how many there are in its attribute
``num_experts``, and is called with ``(tokens [N, H], experts of each token [N, k], their weights [N, k])``; it returns
the weighted sums ``[N, H]``. Since version 5 the experts of transformers have this form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from torch import nn

from neuron_accel.errors import UnsupportedModelError

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "afmoe": "layers.*.mlp.experts",
        "deepseek_v2": "layers.*.mlp.experts",
        "deepseek_v3": "layers.*.mlp.experts",
        "dots1": "layers.*.mlp.experts",
        "ernie4_5_moe": "layers.*.mlp.experts",
        "exaone_moe": "layers.*.mlp.experts",
        "flex_olmo": "layers.*.mlp.experts",
        "glm4_moe": "layers.*.mlp.experts",
        "glm4_moe_lite": "layers.*.mlp.experts",
        "gpt_oss": "layers.*.mlp.experts",
        "granitemoe": "layers.*.block_sparse_moe.experts",
        "granitemoeshared": "layers.*.block_sparse_moe.experts",
        "hunyuan_v1_moe": "layers.*.mlp.experts",
        "jamba": "layers.*.feed_forward.experts",
        "llama4_text": "layers.*.feed_forward.experts",
        "minimax": "layers.*.mlp.experts",
        "minimax_m2": "layers.*.mlp.experts",
        "mixtral": "layers.*.mlp.experts",
        "olmoe": "layers.*.mlp.experts",
        "phimoe": "layers.*.mlp.experts",
        "qwen2_moe": "layers.*.mlp.experts",
        "qwen3_5_moe_text": "layers.*.mlp.experts",
        "qwen3_moe": "layers.*.mlp.experts",
        "qwen3_next": "layers.*.mlp.experts",
        "solar_open": "layers.*.mlp.experts",
    }
)
"""``model_type`` of a configuration of transformers to the pattern of its modules of experts."""


def find_experts(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Returns the modules of experts of a model, by name.

    Args:
        model: the model.
        patterns: patterns of their names, as in the plugin's option ``experts``; without any, that of its family.

    Raises:
        UnsupportedModelError: if its family is unknown, a pattern matches nothing, or a module has another form.
    """
    if not patterns:
        kind: Any = getattr(getattr(model, "config", None), "model_type", None)
        if kind not in FAMILIES:
            raise UnsupportedModelError(
                f"It is not known where the experts of {type(model).__name__} are.",
                where="plugin expert_parallel",
                why=f"its model_type {kind!r} is not among {', '.join(FAMILIES)}",
                fix='name its modules of experts: ExpertParallelPlugin(..., experts=("blocks.*.moe.experts",))',
            )
        patterns = (FAMILIES[kind],)
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matched = {name: module for name, module in model.named_modules() if matches(pattern, name)}
        if not matched:
            raise UnsupportedModelError(
                f"No module of {type(model).__name__} matches {pattern!r}.",
                where="plugin expert_parallel",
                why="there would be nothing to shard",
                fix="pass patterns of names of `model.named_modules()` in the option `experts`",
            )
        found |= matched
    for name, module in found.items():
        _check_form(name, module)
    return found


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches the end of a dotted name; ``*`` stands for one component, or a part of one."""
    wanted, components = pattern.split("."), name.split(".")
    last = components[-len(wanted) :]
    return len(last) == len(wanted) and all(fnmatchcase(n, p) for n, p in zip(last, wanted, strict=True))


def _check_form(name: str, module: nn.Module) -> None:
    experts = getattr(module, "num_experts", None)
    shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    others = [key for key, shape in shapes.items() if shape[:1] != (experts,)]
    buffers = [key for key, _ in module.named_buffers()]
    if type(experts) is int and shapes and not others and not buffers:
        return
    if isinstance(module, nn.ModuleList):
        why = "each expert is a module of its own"
    elif type(experts) is not int or not shapes:
        why = "it has no attribute `num_experts`, or no parameters"
    elif others:
        why = f"dim 0 of its parameter {others[0]!r} {list(shapes[others[0]])} is not the {experts} experts"
    else:
        why = f"it has a buffer {buffers[0]!r}, of which it is not known how to shard it"
    raise UnsupportedModelError(
        f"The module {name!r} ({type(module).__name__}) does not have the form of experts.",
        where="plugin expert_parallel",
        why=why,
        fix="write it as one module with `num_experts`, whose parameters stack the experts along dim 0, and whose "
        "forward(tokens [N, H], experts [N, k], weights [N, k]) returns their weighted sums [N, H]",
    )
