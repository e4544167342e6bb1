# SPDX-License-Identifier: Apache-2.0
"""Finds the repeated blocks of a model, between which it can be split into stages, and the modules before and after
them.

They are taken from the blocks that the user names in ``stage_cuts``, else from transformers' plan for pipelines
(``base_model_pp_plan``), else from this package's plan of the family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from neuron_accel.errors import UnsupportedModelError
from neuron_accel.models.architecture import family_inside, join_fqn, name_of_base
from neuron_accel.models.catalog import plan_for
from neuron_accel.models.llama import LLAMA

_NAMED_LIKE_LLAMA = (
    *("granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "nanochat", "nemotron"),
    *("olmoe", "phimoe", "jetmoe", "lfm3", "moshi"),
)
"""Families without a plan for pipelines, whose blocks, embedding and norm have Llama's names."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A model as modules before its blocks, a list of blocks, and modules after them.

    Args:
        container: FQN of the module whose children, ``"0"``, ``"1"``, ..., are the blocks.
        blocks: number of blocks.
        before: FQNs of the modules with parameters that the first stage needs.
        after: FQNs of the modules with parameters that the last stage needs.
    """

    container: str
    blocks: int
    before: tuple[str, ...]
    after: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, container: str | None = None) -> Stack:
        """Finds the blocks of a model.

        Args:
            model: the model.
            container: FQN of the module that holds the blocks; None to look it up in the plan of the model's family.

        Raises:
            UnsupportedModelError: if there is no plan for the model, or some of its parameters belong to no stage.
        """
        first: tuple[str, ...] = ()
        last: tuple[str, ...] = ()
        if container is None:
            container, first, last = _planned(model)
        modules = dict(model.named_modules())
        parent = modules.get(container)
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)) or not len(parent):
            kind = type(parent).__name__ if parent is not None else "nothing"
            raise UnsupportedModelError(
                f"{container!r} in {type(model).__name__} is {kind}, not a list of blocks.",
                why="stages are cut between the children of an nn.ModuleList or nn.Sequential",
            )
        before: list[str] = []
        after: list[str] = []
        for level in _beside(
            model, container
        ):  # from outer to inner modules; outer ones are before or after the inner ones
            following: list[str] = []
            for fqn, is_before in level:
                is_before = fqn in first if fqn in first or fqn in last else is_before
                (before if is_before else following).append(fqn)
            after = [*following, *after]
        return cls(container=container, blocks=len(parent), before=tuple(before), after=tuple(after))

    @staticmethod
    def container_of(model: nn.Module, cuts: Iterable[str]) -> tuple[str, tuple[int, ...]]:
        """Returns the container and the indices of the blocks that a user named.

        Raises:
            UnsupportedModelError: if they are not blocks, or are in several containers.
        """
        cuts = tuple(cuts)
        modules = dict(model.named_modules())
        parents = {cut.rpartition(".")[0] for cut in cuts}
        for cut in cuts:
            if cut not in modules or not cut.rpartition(".")[2].isdigit():
                raise UnsupportedModelError(
                    f"{cut!r} is not a block of {type(model).__name__}.",
                    where="stage_cuts",
                    why="a cut names the first block of a stage, a child of an nn.ModuleList or nn.Sequential",
                    fix="look at model.named_modules()",
                )
        if len(parents) != 1:
            raise UnsupportedModelError(
                f"The cuts {', '.join(cuts)} are children of {len(parents)} modules.",
                where="stage_cuts",
                why="the stages consist of the blocks of one list",
            )
        return parents.pop(), tuple(int(cut.rpartition(".")[2]) for cut in cuts)

    def block(self, index: int) -> str:
        """Returns the FQN of a block."""
        return join_fqn(self.container, str(index))

    def stages_of(self, starts: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Yields the FQN of every module and the stage that it belongs to.

        Args:
            starts: for each stage, the index of its first block.
        """
        yield from ((fqn, 0) for fqn in self.before)
        for stage, start in enumerate(starts):
            stop = starts[stage + 1] if stage + 1 < len(starts) else self.blocks
            yield from ((self.block(index), stage) for index in range(start, stop))
        yield from ((fqn, len(starts) - 1) for fqn in self.after)


def _planned(model: nn.Module) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Returns the FQN of the container of blocks, and the FQNs before and after it, from the plan of a family."""
    found = family_inside(model)
    if found is None:
        raise _no_plan(model, "it contains no model with a configuration that names its family")
    name, owner = found
    base_name = join_fqn(name, name_of_base(owner))
    base: Any = model.get_submodule(base_name)
    steps = getattr(base.config, "base_model_pp_plan", None) or getattr(base, "_pp_plan", None)
    modules = dict(base.named_modules())
    if steps:
        names = [step for step in steps if step in modules]
        lists = [step for step in names if isinstance(modules[step], nn.ModuleList)]
        if len(lists) == 1:
            place = names.index(lists[0])
            parts = [join_fqn(base_name, step) for step in names]
            return parts[place], tuple(parts[:place]), tuple(parts[place + 1 :])
    config: Any = owner.config
    plan = plan_for(config.model_type) or (LLAMA if config.model_type in _NAMED_LIKE_LLAMA else None)
    if plan is None or not plan.blocks.endswith(".*"):
        raise _no_plan(model, f"no plan describes the blocks of a {config.model_type!r}")
    if plan.of(config).region_inputs or not plan.token_embedding:
        raise _no_plan(model, f"a {config.model_type!r} is not one list of blocks behind a token embedding")
    container = join_fqn(base_name, plan.blocks.removesuffix(".*"))
    norms = (join_fqn(base_name, plan.final_norm),) if plan.final_norm else ()
    return container, (join_fqn(base_name, plan.token_embedding),), norms


def _no_plan(model: nn.Module, why: str) -> UnsupportedModelError:
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    example = f"{lists[0]}.{len(lists[0:1])}" if lists else "blocks.1"
    return UnsupportedModelError(
        f"No plan describes how to split {type(model).__name__} into stages.",
        why=why,
        fix=f"name the blocks at which stages begin: stage_cuts=({example!r},)",
    )


def _beside(model: nn.Module, container: str) -> Iterator[list[tuple[str, bool]]]:
    """Yields, level by level, the FQNs of modules with parameters beside the path from the model to the container, and
    whether each is registered before that path."""
    parent, name = model, ""
    for step in container.split(".") if container else ():
        _check_loose(parent, name)
        is_before, level = True, []
        for child_name, child in parent.named_children():
            if child_name == step:
                is_before = False
            elif any(True for _ in child.parameters()):
                level.append((join_fqn(name, child_name), is_before))
        yield level
        parent, name = getattr(parent, step), join_fqn(name, step)
    _check_loose(parent, name)


def _check_loose(module: nn.Module, name: str) -> None:
    loose = [parameter for parameter, _ in module.named_parameters(recurse=False)]
    if loose:
        raise UnsupportedModelError(
            f"{type(module).__name__} holds parameters of its own: {', '.join(join_fqn(name, p) for p in loose)}.",
            why="it contains the blocks and therefore exists on every stage, but a parameter belongs to one stage",
            fix="put them in a module of their own, before or after the blocks",
        )
