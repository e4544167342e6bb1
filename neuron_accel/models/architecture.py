# SPDX-License-Identifier: Apache-2.0
"""The architecture of a model: a family's plan, and the modules that it describes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from neuron_accel.errors import UnsupportedModelError, did_you_mean
from neuron_accel.models.adapters import with_adapters
from neuron_accel.models.catalog import known_model_types, plan_for, registered_plans
from neuron_accel.models.plan import ArchitecturePlan, named_modules
from neuron_accel.models.upstream import upstream_plan
from neuron_accel.models.user_plan import read_plan


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The modules of one model, as described by a plan.

    Args:
        plan: the plan of its family.
        config: its configuration.
        model: the prepared model, to which FQNs are relative.
        owner: the model of transformers in it (``LlamaForCausalLM``), often ``model`` itself.
        owner_name: FQN of the owner in ``model``; empty if it is ``model`` itself.
        base: the base model in the owner (``LlamaModel``); the owner itself if it has no head.
        base_name: FQN of the base model in ``model``.
        block_names: FQNs of the repeated blocks that a user's plan names; None to use ``plan.blocks``.
    """

    plan: ArchitecturePlan
    config: Any
    model: nn.Module
    owner: nn.Module
    owner_name: str
    base: nn.Module
    base_name: str
    block_names: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"<Architecture of a {type(self.model).__name__}: {self.model_type}, {len(self.blocks)} blocks>"

    @classmethod
    def of(cls, model: nn.Module) -> Architecture:
        """Returns the architecture of the first transformers model that ``model`` is or contains; of a model of several
        inputs without a plan, such as images and text, that of the text model in it.

        Raises:
            UnsupportedModelError: if there is none, or its plan does not cover its configuration.
        """
        found = family_inside(model)
        if found is None:
            raise UnsupportedModelError(
                f"No plan is known for {type(model).__name__}.",
                why="it contains no model with a configuration that names its family (config.model_type)",
                fix=f"use a model of one of these families: {', '.join(known_model_types())}",
            )
        owner_name, owner = found
        prefix = name_of_base(owner)
        base = owner.get_submodule(prefix)
        text = text_inside(owner)
        if text is not None:  # what it has beside, such as an encoder of images, is replicated
            inner = name_of_base(text[1])
            if inner:  # the text model has a head of its own
                owner_name, owner, prefix = join_fqn(owner_name, text[0]), text[1], inner
            else:
                prefix = text[0]
            base = owner.get_submodule(prefix)
        config: Any = base.config
        plan = plan_for(config.model_type) or upstream_plan(owner, base)
        if plan is None:
            raise UnsupportedModelError(
                f"No plan is known for the model type {config.model_type!r} of {type(owner).__name__}.",
                why="a plan is needed to shard its weights",
                fix=did_you_mean(config.model_type, known_model_types()),
            )
        plan = with_adapters(plan.of(config), base)
        if text is not None and hasattr(base, "_deepstack_process"):
            plan = replace(plan, sequence="it adds the features of images to hidden states between its blocks")
        for attribute, reason in plan.unsupported.items():
            if getattr(config, attribute, None):
                raise UnsupportedModelError(
                    f"The plan of {config.model_type!r} does not cover {attribute}={getattr(config, attribute)!r}.",
                    where=type(owner).__name__,
                    why=reason,
                )
        return cls(
            plan=plan,
            config=config,
            model=model,
            owner=owner,
            owner_name=owner_name,
            base=base,
            base_name=join_fqn(owner_name, prefix),
        )

    @classmethod
    def planned(cls, model: nn.Module, plan: Mapping[str, str] | None, degree: int) -> Architecture:
        """Returns the architecture of a model that is sharded over ``degree`` ranks: by a user's plan, by default that
        registered for it or for modules in it, else by the plan of its family.

        Raises:
            ConfigurationError: if a style is not valid.
            UnsupportedModelError: if no plan covers the model.
            LayoutError: if the value of an attribute of the plan is not divisible by the degree.
        """
        plan = registered_plans().find(model) if plan is None else plan
        if plan is None:
            return cls.of(model)
        return cls(model=model, owner=model, owner_name="", base=model, base_name="", **read_plan(model, plan, degree))

    @property
    def model_type(self) -> str:
        return self.config.model_type

    def at(self, degree: int) -> Architecture:
        """Returns the architecture without the regions that cannot be sharded over ``degree`` ranks."""
        return replace(self, plan=self.plan.at(degree, self.config)) if self.plan.replicated_if_uneven else self

    def find(self, pattern: str) -> Iterator[tuple[str, nn.Module]]:
        """Yields FQN (in ``model``) and module of all modules that a pattern of the plan matches, in the order of the
        model."""
        for name, module in named_modules(self.base, pattern):
            yield join_fqn(self.base_name, name), module

    @property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        """FQN and module of the repeated blocks, in order."""
        if self.block_names is not None:
            return [found for name in self.block_names for found in self.find(name)]
        return list(self.find(self.plan.blocks))

    @property
    def regions(self) -> list[tuple[str, nn.Module]]:
        """FQN and module of the tensor-parallel regions, in order: the modules that match the plan's regions and
        contain a module or parameter with a style. Other modules of the same name may be layers of another kind."""
        sharded = self.around_styles
        return [found for pattern in self.plan.regions for found in self.find(pattern) if found[0] in sharded]

    @property
    def around_styles(self) -> set[str]:
        """FQNs of all modules and parameters that have a style, and of the modules that contain them."""
        result: set[str] = set()
        for pattern in self.plan.styles:
            parent, _, name = pattern.rpartition(".")
            found = [fqn for fqn, _ in self.find(pattern)]
            found += [fqn for fqn, module in self.find(parent) if name in module._parameters]
            for fqn in found:
                while fqn and fqn not in result:
                    result.add(fqn)
                    fqn = fqn.rpartition(".")[0]
        return result

    @property
    def last(self) -> tuple[str, nn.Module]:
        """FQN and module of the norm after the blocks, or of the last block if there is none."""
        return self._one(self.plan.final_norm) if self.plan.final_norm else self.blocks[-1]

    @property
    def token_embedding(self) -> tuple[str, nn.Module]:
        """FQN and module of the token embedding."""
        return self._one(self.plan.token_embedding)

    @property
    def head(self) -> tuple[str, nn.Module] | None:
        """FQN and module of the projection to the vocabulary; None if the model has none."""
        module = dict(self.owner.named_modules()).get(self.plan.head)
        return None if module is None else (join_fqn(self.owner_name, self.plan.head), module)

    def _one(self, pattern: str) -> tuple[str, nn.Module]:
        found = list(self.find(pattern))
        if len(found) != 1:
            raise UnsupportedModelError(
                f"{type(self.base).__name__} has {len(found)} modules named {pattern!r}, one was expected.",
                where=f"the plan of model type {self.model_type!r}",
                why="the model is not built as its model type says",
            )
        return found[0]


def name_of_base(owner: nn.Module) -> str:
    """Returns the name of the base model in a model of transformers; empty if it is the base model itself."""
    prefix: Any = owner.base_model_prefix
    if prefix and isinstance(getattr(owner, prefix, None), nn.Module):
        return prefix
    # In some classes the base model has another name than the inherited base_model_prefix.
    inside = [
        name
        for name, module in owner.named_children()
        if hasattr(type(module), "base_model_prefix") and getattr(module, "config", None) is owner.config
    ]
    return inside[0] if len(inside) == 1 else ""


def family_inside(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Returns FQN and module of the first transformers model that ``model`` is or contains; None if there is none."""
    # The class is inspected, not the instance: wrappers such as adapters forward attributes to the module they wrap.
    for name, module in model.named_modules():
        if hasattr(type(module), "base_model_prefix") and getattr(module, "config", None) is not None:
            return name, module
    return None


def text_inside(owner: nn.Module) -> tuple[str, nn.Module] | None:
    """Returns name and module of the text model in a model of several inputs, such as images and text; None if there is
    none, or a plan for the model itself, or if it is a decoder that attends to an encoder."""
    config: Any = owner.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if plan_for(config.model_type) or text.model_type == config.model_type or config.is_encoder_decoder:
        return None
    for name, module in owner.named_modules():
        kind = getattr(getattr(module, "config", None), "model_type", None)
        if hasattr(type(module), "base_model_prefix") and kind == text.model_type:
            return name, module
    return None


def join_fqn(prefix: str, name: str) -> str:
    """Returns ``"prefix.name"``; either may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def model_without_weights(config: Any) -> nn.Module:
    """Returns the causal language model of a configuration, on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
