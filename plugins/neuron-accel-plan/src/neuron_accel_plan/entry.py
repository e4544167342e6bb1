# SPDX-License-Identifier: Apache-2.0
"""``neuron_accel.plan``: counts one layout, or searches for the fastest."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from neuron_accel.commands import load_config
from neuron_accel.errors import ConfigurationError
from neuron_accel_plan.layout import LayoutCount, Planner, no_collection_of_what_is_there
from neuron_accel_plan.search import Layout, Search, search

if TYPE_CHECKING:
    from neuron_accel.contract import StrategyPlugin
    from neuron_accel_plan.calibration import Machine


@overload
def plan(
    model: str | os.PathLike[str] | Any,
    *,
    world_size: int,
    global_batch: int,
    sequence: int,
    plugins: Sequence[StrategyPlugin] = (),
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    accumulation: int | None = None,
    instance: str | None = None,
    dtype: str = "bfloat16",
    attention: str = "eager",
    reserve: int | None = None,
    foreach: bool | None = None,
    rank: int | None = None,
    full_depth: bool = False,
) -> LayoutCount: ...
@overload
def plan(
    model: str | os.PathLike[str] | Any,
    *,
    instances: int,
    instance: str,
    global_batch: int,
    sequence: int,
    dtype: str = "bfloat16",
    attention: str = "eager",
    reserve: int | None = None,
    price_per_hour: float | None = None,
    calibration: Machine | None = None,
    best: int = 10,
    jobs: int = 1,
    within: float | None = None,
    progress: Callable[[int, int], None] = ...,
) -> Search: ...
def plan(
    model: str | os.PathLike[str] | Any,
    *,
    world_size: int | None = None,
    instances: int | None = None,
    global_batch: int,
    sequence: int,
    plugins: Sequence[StrategyPlugin] = (),
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    accumulation: int | None = None,
    instance: str | None = None,
    dtype: str = "bfloat16",
    attention: str = "eager",
    reserve: int | None = None,
    foreach: bool | None = None,
    rank: int | None = None,
    full_depth: bool = False,
    **options: Any,
) -> LayoutCount | Search:
    """Counts what a rank needs, by a dry run: the plan, ``prepare``, forward and backward passes and the step of AdamW
    are those of a real run, on tensors without memory. Nothing is loaded, and no other rank exists.

    With ``world_size`` one layout is counted, that of ``plugins`` and ``config``. With ``instances`` all layouts that
    the installed plugins support are searched: those that do not fit are ruled out, and the others are ranked by
    predicted time.

    Args:
        model: a folder with a transformers ``config.json``, that file, or a configuration object, of a causal language
            model; the name of a popular one, such as ``"llama-3.1-8b"``; or one of Hugging Face's hub, whose
            ``config.json`` is in its cache.
        world_size: number of ranks.
        instances: number of instances; all of their cores are used.
        global_batch: samples in an optimizer step, over all ranks.
        sequence: tokens in a sample.
        plugins: the strategies.
        config: further strategies, and ``gradient_accumulation_steps``: as for ``NeuronAccelerator``.
        accumulation: micro-batches in a step; by default those of ``config``, or, with an instance, the fewest that fit
            (1 if none do).
        instance: instance type, against whose limits and core memory the layout is checked.
        dtype: dtype of the weights, ``"bfloat16"`` or ``"float32"``.
        attention: ``attn_implementation`` of transformers.
        reserve: bytes of a core that are left to what is not counted, the runtime, compiled graphs and collectives; by
            default 10% of the core's memory.
        foreach: whether AdamW updates all parameters at once, which takes a copy of its second moments. That is torch's
            choice on CUDA and on native Neuron devices, and the default with an instance of these, otherwise False.
        rank: the rank that is counted; by default the one that keeps the most, of which each stage of a pipeline has
            its own.
        full_depth: whether to run all blocks and micro-batches, instead of few and extrapolating.
        options: of a search: ``price_per_hour`` of an instance; ``calibration``, measured constants for the prediction
            of time; ``best``, the number of layouts to find, 10 by default; ``jobs``, the most processes that dry runs
            are shared by, 1 by default (each has about half a gigabyte, and a script needs
            ``if __name__ == "__main__":`` then); ``within``, seconds after which it ends with what it has found, once a
            layout fits (by default when nothing that is left can be faster); ``progress``, which is called with the
            number of dry runs that are done and that will be done.

    Raises:
        ConfigurationError: for an unknown model, instance or option.
        PlanError: if the plugins cannot run together, on this many ranks or hardware, or the batch does not divide.
        LayoutError: if the model cannot be sharded so.
        UnsupportedModelError: if no plan covers the model.
    """
    if instances is not None:
        given = {"world_size": world_size, "plugins": plugins or None, "config": config, "accumulation": accumulation}
        given |= {"rank": rank, "full_depth": full_depth or None, "foreach": foreach}
        wrong = [name for name, value in given.items() if value is not None]
        if wrong or instance is None:
            raise ConfigurationError(
                f"A search does not take {', '.join(wrong)}." if wrong else "A search needs an instance.",
                where="instances",
                why="it tries all layouts on so many instances, with all of their cores",
                fix="leave instances out to count one layout" if wrong else "name an instance type",
            )
        return search(
            model,
            instances=instances,
            instance=instance,
            global_batch=global_batch,
            sequence=sequence,
            dtype=dtype,
            attention=attention,
            reserve=reserve,
            **options,
        )
    if world_size is None or options:
        raise ConfigurationError(
            f"{', '.join(options)} belong to a search." if options else "The number of ranks is not given.",
            fix="pass world_size to count one layout, or instances to search",
        )
    planner, layout = layout_of(
        model,
        world_size=world_size,
        global_batch=global_batch,
        sequence=sequence,
        plugins=plugins,
        config=config,
        accumulation=accumulation,
        instance=instance,
        dtype=dtype,
        attention=attention,
        reserve=reserve,
        foreach=foreach,
    )
    with no_collection_of_what_is_there():
        return count_fitting(planner, layout, rank=rank, full_depth=full_depth)[0]


def count_fitting(
    planner: Planner, layout: Layout, *, rank: int | None = None, full_depth: bool = False
) -> tuple[LayoutCount, Layout]:
    """Returns the count of a layout, and the layout: if its number of micro-batches is 0, with the fewest that fit, or
    1 if none do."""
    if layout.accumulation:
        return planner.count(layout.plugins, layout.accumulation, rank=rank, full_depth=full_depth), layout
    for number in planner.accumulations(layout.plugins):
        if number == 1 or planner.count(layout.plugins, number, rank=rank, quick=True).fits:
            chosen = dataclasses.replace(layout, accumulation=number)
            counted = planner.count(chosen.plugins, number, rank=rank, full_depth=full_depth)
            if counted.fits in (True, None):
                return counted, chosen
    first = dataclasses.replace(layout, accumulation=1)
    return planner.count(first.plugins, 1, rank=rank, full_depth=full_depth), first


def layout_of(
    model: str | os.PathLike[str] | Any,
    *,
    world_size: int,
    plugins: Sequence[StrategyPlugin] = (),
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    accumulation: int | None = None,
    **arguments: Any,
) -> tuple[Planner, Layout]:
    """Returns what counts layouts of a model, and the layout that is given, with an accumulation of 0 if the number of
    micro-batches is to be chosen; see :func:`plan`."""
    accelerate: dict[str, Any] = {}
    chosen = list(plugins)
    if config is not None:
        loaded = load_config(config)
        accelerate, steps = dict(loaded.accelerate), loaded.accelerate.get("gradient_accumulation_steps", 1)
        chosen += loaded.plugins
        if accumulation is not None and accumulation != steps and steps != 1:
            raise ConfigurationError(
                f"accumulation={accumulation} and the configuration's {steps} contradict each other.",
                fix="leave one of them out",
            )
        if accumulation is None and "gradient_accumulation_steps" in loaded.accelerate:
            accumulation = steps
    planner = Planner(model, world_size=world_size, options=accelerate, **arguments)
    if accumulation is None and planner.instance is None:
        accumulation = 1
    return planner, Layout(plugins=tuple(chosen), accumulation=accumulation or 0)
