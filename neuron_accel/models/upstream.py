# SPDX-License-Identifier: Apache-2.0
"""Plans derived from transformers' own plans for its models: ``base_model_tp_plan`` and ``base_model_pp_plan``.

These plans are checked against the modules of the model. They do not say which features belong to one head; this is
determined from the configuration, and must match the sizes of the weights. Anything that does not match or is not
recognised raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from neuron_accel.errors import UnsupportedModelError
from neuron_accel.models.delta import DeltaForm, delta_form
from neuron_accel.models.llama import ROUTER_LOGITS
from neuron_accel.models.plan import (
    ArchitecturePlan,
    Style,
    colwise,
    counted_once,
    experts,
    matches_fqn,
    named_modules,
    partial,
    rowwise,
    sharded,
    shared,
    spanning,
)

T = TypeVar("T")

_COLWISE = ("colwise", "colwise_gather_output", "colwise_rep")
_ROWWISE = ("rowwise", "rowwise_split_input", "rowwise_rep")
_NOTHING = frozenset({"replicate", "local_params", "embedding_rowwise"})
"""Styles of replicated modules, and of token embeddings, which have their own rule here."""
_LATENT = frozenset({"mla_kv_a_proj"})
"""Styles of attention over latent features, which transformers' plans leave partly or fully replicated."""
_OF_LATENT = {
    "q_proj": colwise(units="num_attention_heads"),
    "q_a_proj": shared(),
    "q_a_layernorm": shared(),
    "q_b_proj": colwise(units="num_attention_heads"),
    "q_gate_proj": colwise(units="num_attention_heads"),
    "kv_a_proj_with_mqa": shared(),
    "kv_a_layernorm": shared(),
    "kv_b_proj": colwise(units="num_attention_heads"),
    "g_proj": colwise(units="num_attention_heads"),
    "gate_proj": colwise(units="num_attention_heads"),
    "o_proj": rowwise(units="num_attention_heads"),
}
"""Styles of attention over latent features: every rank computes the latent features, and from them queries, keys,
values and gates of its heads."""
_INDEX = "indexer"
"""Module that chooses the positions that all heads attend to. Its weights get no gradients."""
_SHARED = ("replicated_with_grad_allreduce",)

_HEADS, _GROUPS = "num_attention_heads", "num_key_value_heads"
_OF_HEADS = {"q_proj": _HEADS, "k_proj": _GROUPS, "v_proj": _GROUPS}
_OF_NORMS = {"q_norm": _HEADS, "k_norm": _GROUPS}
_GATED = frozenset({"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"})
"""Families whose query projection has, for each head, a query followed by a gate."""

_GATES = ("g_proj", "gate_proj")
"""Projections in attention to gates of heads, or of features of heads."""

_COUNTERS = {
    "num_heads": _HEADS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _GROUPS,
    "num_kv_heads": _GROUPS,
}
"""The names that attention modules give to their numbers of heads."""

_MIXTURES = frozenset({
    "afmoe", "aria_text", "axk2", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "deepseek_v4", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe_text", "glm_moe_dsa", "granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe",
    "hy_v3", "hy_v4", "inkling2_text", "jamba", "kimi_linear", "kolibri1", "laguna", "llama4_text",
    "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral",
    "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    "qwen3_omni_moe_text", "qwen3_vl_moe_text", "solar_open",
})  # fmt: skip
"""Families whose mixture of experts is a sum over experts, weighted by the router."""

_EXPERTS_OF = {
    "longcat_flash": {
        "layers.*.mlp.experts.gate_up_proj": sharded(blocks=2, dim=1),
        "layers.*.mlp.experts.down_proj": sharded(dim=2),
        "layers.*.mlp.experts.identity_expert": counted_once(),
    },
    "llama4_text": {
        "layers.*.feed_forward.experts.gate_up_proj": sharded(blocks=2, dim=2),
        "layers.*.feed_forward.experts.down_proj": sharded(dim=1),
    },
    "nemotron_h": {
        "layers.*.mixer.experts.up_proj": sharded(dim=1),
        "layers.*.mixer.experts.down_proj": sharded(dim=2),
    },
}
"""Styles of experts of other forms: not declared as gated or transposed, without gates, or without weights."""
_LEFT_OUT = {
    "nemotron_h": {
        "layers.*.mixer.q_proj": colwise(units="num_attention_heads"),
        "layers.*.mixer.k_proj": colwise(units="num_key_value_heads"),
        "layers.*.mixer.v_proj": colwise(units="num_key_value_heads"),
        "layers.*.mixer.o_proj": rowwise(units="num_attention_heads"),
        "layers.*.mixer.up_proj": colwise(),
        "layers.*.mixer.down_proj": rowwise(),
    },
}
"""Styles of layers that are missing in transformers' plan of a family; not every model has all of them."""

_FURTHER_EMBEDDINGS = {"gemma4_text": ("embed_tokens_per_layer",)}

_NO_SEQUENCE = {
    "deepseek_v4": "it keeps several residual streams, whose second dim is not the sequence",
    "hy_v4": "the module that mixes its residual streams returns two tensors, both sharded along the sequence",
}

_REFUSED = {
    "gemma3n_text": "it mixes the features of a feed-forward layer (activation sparsity) and keeps four hidden states",
    "hrm_text": "it applies its blocks repeatedly, in cycles",
}


def upstream_plan(owner: nn.Module, base: nn.Module) -> ArchitecturePlan | None:
    """Returns the plan of a model, derived from transformers' plan; None if transformers has none.

    Args:
        owner: the model, such as ``LlamaForCausalLM``.
        base: the base model in it.

    Raises:
        UnsupportedModelError: if that plan is not recognised, or does not fit the model.
    """
    config = base.config
    styles = {n: s for n, s in (getattr(config, "base_model_tp_plan", None) or {}).items() if s not in _NOTHING}
    steps = getattr(config, "base_model_pp_plan", None) or {}
    if not styles:
        return None
    return _Translation(owner, base, styles, steps).plan()


class _Translation:
    def __init__(self, owner: nn.Module, base: nn.Module, styles: dict[str, str], steps: dict[str, Any]) -> None:
        # models of transformers, whose attributes torch types as Tensor | Module
        self._owner: Any = owner
        self._base: Any = base
        self._config: Any = base.config
        self._modules = dict(base.named_modules())
        self._parameters = dict(base.named_parameters())
        self._styles, self._steps = styles, steps
        self._of_each_head: dict[str, Style] = {}
        """Parameters of attention modules themselves with one element for each head."""

    def plan(self) -> ArchitecturePlan:
        if self._config.model_type in _REFUSED:
            raise self._unsupported(f"{type(self._base).__name__} is not supported.", _REFUSED[self._config.model_type])
        present = {pattern: style for pattern, style in self._styles.items() if self._there(pattern)}
        mixtures = [p for p, style in present.items() if style == "moe_tp_experts"]
        translated, regions = self._mixtures(mixtures, present)
        translated |= self._of_each_head
        present = {p: style for p, style in present.items() if p not in translated and p not in mixtures}
        for region in dict.fromkeys(pattern.rpartition(".")[0] for pattern in present):
            inside = {p.rpartition(".")[2]: s for p, s in present.items() if p.rpartition(".")[0] == region}
            if set(inside.values()) == {"colwise_gather_output"}:
                continue  # replicated: every rank needs all features afterwards
            if _LATENT.intersection(inside.values()):
                continue  # replicated, or sharded by _latent_attention
            translated |= self._region(region, inside)
            regions.append(region)
        for pattern, style in _LEFT_OUT.get(self._config.model_type, {}).items():
            if any(True for _ in self._find(pattern)):
                translated[pattern] = style
                regions.append(pattern.rpartition(".")[0])
        latent, delta = self._latent_attention(), self._linear_attention()
        for region, parts in latent.items():
            translated |= {f"{region}.{leaf}": style for leaf, style in parts.items()}
        for region, form in delta.items():
            translated |= {f"{region}.{leaf}": style for leaf, style in form.styles.items()}
        regions = list(dict.fromkeys([*latent, *delta, *regions]))
        blocks, embedding, norm = self._stack()
        return ArchitecturePlan(
            model_types=(self._config.model_type,),
            blocks=f"{blocks}.*",
            token_embedding=embedding,
            further_embeddings=_FURTHER_EMBEDDINGS.get(self._config.model_type, ()),
            final_norm=norm,
            regions=tuple(regions),
            styles=translated,
            head=self._head(),
            per_rank=self._counters([r for r in regions if r not in latent], translated)
            | {region: {"num_heads": _HEADS} for region in latent}
            | {
                (f"{region}.{part}" if part else region): counted
                for region, form in delta.items()
                for part, counted in form.counters.items()
            },
            region_outputs=ROUTER_LOGITS if mixtures else (),
            replicated_if_uneven={region: tuple(form.heads) for region, form in delta.items()},
            sequence=self._why_no_sequence(blocks, regions),
        )

    def _find(self, pattern: str) -> Iterator[tuple[str, Any]]:
        return iter(named_modules(self._base, pattern))

    def _there(self, pattern: str) -> bool:
        if any(True for _ in self._find(pattern)):
            return True
        for name, parameter in self._parameters.items():
            if matches_fqn(pattern, name) and self._styles.get(pattern.rpartition(".")[0]) != "moe_tp_experts":
                if tuple(parameter.shape) == (self._count(_HEADS),) and self._styles[pattern] == "colwise":
                    self._of_each_head[pattern] = sharded(units=_HEADS)
                    return False
                raise self._unsupported(
                    f"The parameter {name!r} has style {self._styles[pattern]!r}.", "only linear layers can be sharded"
                )
        return False  # an optional module, which this model does not have

    # ---- mixtures of experts -----------------------------------------------------------------------------------------
    def _mixtures(self, patterns: list[str], present: dict[str, str]) -> tuple[dict[str, Style], list[str]]:
        """Returns styles and regions of the layers with mixtures of experts."""
        styles: dict[str, Style] = {}
        regions = [pattern.rpartition(".")[0] for pattern in patterns]
        if patterns and self._config.model_type not in _MIXTURES:
            raise self._unsupported(
                f"The mixture of experts {patterns[0]!r} is not supported.",
                "it is not known which terms of its output must be counted once",
            )
        for pattern, region in zip(patterns, regions, strict=True):
            styles |= _EXPERTS_OF.get(self._config.model_type, {pattern: experts()})
            for name, module in self._find(region):
                if not hasattr(module, pattern.rpartition(".")[2]):
                    continue  # a dense layer of the same name
                for leaf, child in module.named_modules():
                    if leaf and self._own_parameters(child) and not matches_fqn(pattern, f"{name}.{leaf}"):
                        styles[f"{region}.{leaf}"] = self._beside_experts(
                            f"{region}.{leaf}", present.get(f"{region}.{leaf}")
                        )
        return styles, regions

    @staticmethod
    def _own_parameters(module: nn.Module) -> bool:
        return any(True for _ in module.parameters(recurse=False))

    def _beside_experts(self, pattern: str, style: str | None) -> Style:
        """Returns the style of a router, or of a shared expert, whose output is added to that of the others."""
        *_, parent, leaf = pattern.split(".")
        if style in _COLWISE or (style is None and leaf in ("gate_proj", "up_proj")):
            return colwise()
        if style in _ROWWISE or (style is None and leaf == "down_proj"):
            return partial()
        if parent.startswith("shared_expert") or style is not None:
            raise self._unsupported(f"There is no rule to shard {pattern!r}.", "it has no style")
        return shared()

    # ---- regions -----------------------------------------------------------------------------------------------------
    def _region(self, region: str, styles: dict[str, str]) -> dict[str, Style]:
        kinds = {leaf: self._kind(f"{region}.{leaf}", style) for leaf, style in styles.items()}
        exits = [leaf for leaf, kind in kinds.items() if kind == "rowwise"]
        if len(exits) != 1:
            raise self._unsupported(
                f"The region {region!r} has {len(exits)} row-wise projections.", "a region ends in one of them"
            )
        is_attention = any(hasattr(module, "num_key_value_groups") for _, module in self._find(region))
        make = self._of_attention if is_attention else self._of_features
        return {f"{region}.{leaf}": style for leaf, style in make(region, kinds, exits[0]).items()}

    def _latent_attention(self) -> dict[str, dict[str, Style]]:
        """Returns regions of attention over latent features, and the styles in them. Attention with further modules is
        replicated."""
        parts = {name.rpartition(".")[0] for name in self._modules if name.endswith(".kv_a_proj_with_mqa")}
        styles = {name: self._latent_styles(self._modules[name]) for name in sorted(parts)}
        result = self._by_pattern({name: found for name, found in styles.items() if found})
        for region, found in result.items():  # in some models only some layers have an index
            of_index = (leaf for name, _ in self._find(f"{region}.{_INDEX}") for leaf in self._children(name))
            result[region] = found | {f"{_INDEX}.{leaf}": shared() for leaf in of_index}
        return result

    def _children(self, name: str) -> list[str]:
        return [child for child, _ in self._modules[name].named_children()]

    def _linear_attention(self) -> dict[str, DeltaForm]:
        """Returns regions of linear attention, and their forms."""
        parents = {name.rpartition(".")[0] for name in self._modules if name.endswith(".conv1d")}
        forms = {name: delta_form(self._modules[name], self._config) for name in sorted(parents)}
        return self._by_pattern({name: form for name, form in forms.items() if form is not None})

    def _by_pattern(self, found: dict[str, T]) -> dict[str, T]:
        """Returns values of modules by a pattern, if they are equal for all modules that it matches, or else by FQN."""
        result: dict[str, T] = {}
        for name, value in found.items():
            pattern = re.sub(r"\.\d+\.", ".*.", name)
            alike = all(found.get(other) == value for other, _ in self._find(pattern))
            result[pattern if alike else name] = value
        return result

    def _latent_styles(self, attention: nn.Module) -> dict[str, Style]:
        """Returns the styles in an attention module if it consists of the submodules of latent attention and no others;
        else an empty dict."""
        parts: dict[str, Any] = {
            leaf: child for leaf, child in attention.named_children() if any(True for _ in child.parameters())
        }
        index = parts.pop(_INDEX, None)
        if index is not None and self._own_parameters(index):
            return {}
        sizes: list[Any] = [
            getattr(attention, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        ]
        heads: Any = getattr(attention, "num_heads", None)
        own = {name: p.shape for name, p in attention.named_parameters(recurse=False)}
        sinks = {"sinks": sharded(units=_HEADS)} if own == {"sinks": (heads,)} else {}
        known = parts.keys() <= _OF_LATENT.keys() and own.keys() == sinks.keys()
        if not known or heads != self._count(_HEADS) or not all(isinstance(size, int) for size in sizes):
            return {}
        nope, rope, value = sizes
        expected = {
            ("q_proj", 0): nope + rope,
            ("q_b_proj", 0): nope + rope,
            ("q_gate_proj", 0): nope + rope + value,
            ("g_proj", 0): 1,
            ("gate_proj", 0): value,
            ("kv_b_proj", 0): nope + value,
            ("o_proj", 1): value,
        }
        fits = all(
            type(parts[leaf]) is nn.Linear and parts[leaf].weight.shape[dim] == heads * size
            for (leaf, dim), size in expected.items()
            if leaf in parts
        )
        if not fits or not {"kv_b_proj", "o_proj"} <= parts.keys():
            return {}
        return {leaf: style for leaf, style in _OF_LATENT.items() if leaf in parts} | sinks

    def _kind(self, pattern: str, style: str) -> str:
        for kind, names in (("colwise", _COLWISE), ("rowwise", _ROWWISE), ("shared", _SHARED)):
            if style in names:
                if kind != "shared":
                    self._check_linear(pattern)
                return kind
        raise self._unsupported(
            f"The style {style!r} of {pattern!r} is not supported.", "this library does not implement it"
        )

    def _check_linear(self, pattern: str) -> None:
        for name, module in self._find(pattern):
            if not isinstance(getattr(module, "base_layer", module), nn.Linear):  # which peft may have wrapped
                raise self._unsupported(f"{name!r} is a {type(module).__name__}.", "only linear layers can be sharded")

    def _of_attention(self, region: str, kinds: dict[str, str], exit: str) -> dict[str, Style]:
        result: dict[str, Style] = {}
        for leaf, kind in kinds.items():
            if kind == "colwise":
                result[leaf] = self._heads_of(f"{region}.{leaf}")
            elif kind == "rowwise":
                self._check_heads(f"{region}.{leaf}", 1, (_HEADS,))
                result[leaf] = rowwise(units=_HEADS)
        for leaf in {**kinds, **_OF_NORMS}:
            if leaf not in result and any(True for _ in self._find(f"{region}.{leaf}")):
                result[leaf] = self._norm_of(f"{region}.{leaf}", leaf)
        return result

    def _heads_of(self, pattern: str) -> Style:
        leaf = pattern.rpartition(".")[2]
        if leaf in _OF_HEADS:
            gated = leaf == "q_proj" and self._config.model_type in _GATED
            self._check_heads(pattern, 0, (_OF_HEADS[leaf],) * (2 if gated else 1))
            return colwise(units=_OF_HEADS[leaf])
        if leaf in _GATES:
            for name, module in self._find(pattern):
                heads, features = self._count(_HEADS), module.weight.shape[0]
                if features not in (heads, heads * self._head_size(name)):
                    raise self._unsupported(f"{name!r} has {features} features.", "their heads cannot be determined")
            return colwise(units=_HEADS)
        if leaf == "qkv_proj":
            units = (_HEADS, _GROUPS, _GROUPS)
            self._check_heads(pattern, 0, units)
            return colwise(units=units)
        raise self._unsupported(
            f"The heads of {pattern!r} cannot be determined.", "its name is not one of the known projections"
        )

    def _check_heads(self, pattern: str, dim: int, units: tuple[str, ...]) -> None:
        for name, module in self._find(pattern):
            head = self._head_size(name)
            expected = sum(self._count(unit) for unit in units) * head
            if module.weight.shape[dim] != expected:
                raise self._unsupported(
                    f"{name!r} has {module.weight.shape[dim]} features, not {' + '.join(units)} of {head} each.",
                    "their heads cannot be determined",
                )

    def _norm_of(self, pattern: str, leaf: str) -> Style:
        for name, module in self._find(pattern):
            head, heads = self._head_size(name), self._count(_OF_NORMS.get(leaf, _HEADS))
            shapes = {tuple(parameter.shape) for parameter in module.parameters()}
            if not shapes or shapes == {(head,)}:
                return shared()
            if shapes == {(heads * head,)}:
                return spanning(units=_OF_NORMS.get(leaf, _HEADS))
            if shapes == {(heads, head)}:
                return sharded(units=_OF_NORMS.get(leaf, _HEADS))
            raise self._unsupported(
                f"The norm {name!r} has parameters of shapes {shapes}.", "they do not match the heads"
            )
        raise AssertionError  # only called for norms that exist

    def _head_size(self, name: str) -> int:
        attention = self._modules[name.rpartition(".")[0]]
        size = getattr(attention, "head_dim", None)
        if not isinstance(size, int):
            raise self._unsupported(f"The head size of {name!r} is not known.", "it has no head_dim")
        return size

    def _count(self, unit: str) -> int:
        try:
            count = getattr(self._config, unit, None) or getattr(self._config, _HEADS, None)
        except RuntimeError as error:  # raised by configurations that differ between layers
            raise self._unsupported(f"Its layers differ in {unit}.", "all layers must have the same number") from error
        if not isinstance(count, int):
            raise self._unsupported(f"The configuration has no {unit}.", "the number of heads is not known")
        return count

    def _of_features(self, region: str, kinds: dict[str, str], exit: str) -> dict[str, Style]:
        blocks = dict.fromkeys(kinds, 1)
        for name, module in self._find(region):
            inner = getattr(module, exit).weight.shape[1] if hasattr(module, exit) else None
            for leaf, kind in kinds.items():
                if kind != "colwise" or not hasattr(module, leaf) or inner is None:
                    continue
                outer = getattr(module, leaf).weight.shape[0]
                if outer == 2 * inner and leaf == "gate_up_proj":
                    blocks[leaf] = 2
                elif outer != inner:
                    raise self._unsupported(
                        f"{name}.{leaf} has {outer} output features and {exit} has {inner} inputs.",
                        "they must be equal",
                    )
        made = {
            "colwise": lambda leaf: colwise(blocks=blocks[leaf]),
            "rowwise": lambda _: rowwise(),
            "shared": lambda _: shared(),
        }
        return {leaf: made[kind](leaf) for leaf, kind in kinds.items()} | self._learned_activation(region)

    def _learned_activation(self, region: str) -> dict[str, Style]:
        """Returns the style of an activation whose parameters are scalars; an empty dict if there is none."""
        for _, module in self._find(f"{region}.act_fn"):
            sizes = {parameter.numel() for parameter in module.parameters()}
            return {"act_fn": shared()} if sizes == {1} else {}
        return {}

    def _counters(self, regions: list[str], styles: dict[str, Style]) -> dict[str, dict[str, str]]:
        """Returns the attributes of attention modules that count heads."""
        result: dict[str, dict[str, str]] = {}
        for region in regions:
            modules = dict(self._find(region))
            attention = {name: module for name, module in modules.items() if hasattr(module, "num_key_value_groups")}
            for name, module in attention.items():
                found = {n: units for n, units in _COUNTERS.items() if vars(module).get(n) == self._count(units)}
                if f"{region}.qkv_proj" in styles:
                    found[f"config.{_HEADS}"] = _HEADS
                result[region if len(attention) == len(modules) else name] = found
        return {region: found for region, found in result.items() if found}

    # ---- the rest ----------------------------------------------------------------------------------------------------
    def _stack(self) -> tuple[str, str, str]:
        """Returns the FQNs of the list of blocks, the token embedding and the final norm."""
        # Without a plan for pipelines, the order of the children is used.
        steps = self._steps or {name: () for name, _ in self._base.named_children() if "rotary" not in name}
        there = [step for step in steps if step in self._modules]
        lists = [step for step in there if isinstance(self._modules[step], nn.ModuleList)]
        embedding = self._base.get_input_embeddings()
        names = [name for name, module in self._modules.items() if module is embedding]
        after = there[there.index(lists[0]) + 1 :] if len(lists) == 1 else []
        if len(lists) != 1 or len(after) != 1 or not names:
            raise self._unsupported(
                "Its blocks, its token embedding and its final norm cannot be identified.",
                f"it consists of {', '.join(there)}",
            )
        return lists[0], names[0], after[0]

    def _head(self) -> str:
        head = self._owner.get_output_embeddings() if self._owner is not self._base else None
        names = [name for name, module in self._owner.named_modules() if head is not None and module is head]
        return names[0] if names else "lm_head"

    def _why_no_sequence(self, blocks: str, regions: list[str]) -> str:
        if self._config.model_type in _NO_SEQUENCE:
            return _NO_SEQUENCE[self._config.model_type]
        if getattr(self._config, "hidden_size_per_layer_input", None):
            return "its blocks have further inputs, one for each token"
        depth = len(_named_parts(blocks)) + 1
        inside = [region for region in regions if len(_named_parts(region)) > depth]
        return f"{inside[0]!r} is nested inside another module of its block" if inside else ""

    def _unsupported(self, what: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            what,
            where=f"transformers' own plan of model type {self._config.model_type!r} ({type(self._owner).__name__})",
            why=why,
        )


def _named_parts(pattern: str) -> list[str]:
    """Returns the names in a pattern, without indices of ModuleLists."""
    return [part for part in pattern.split(".") if part != "*" and not part.isdigit()]
