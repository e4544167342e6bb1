# SPDX-License-Identifier: Apache-2.0
"""Compares training with plugins on several ranks to training in one process: see :mod:`neuron_accel.parity`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from neuron_accel.engine.plan.config import load_config
from neuron_accel.engine.plan.mesh import AxisSpec
from neuron_accel.engine.plan.plugin import StrategyPlugin
from neuron_accel.parity import Batch as Batch
from neuron_accel.parity import Tolerance as Tolerance
from neuron_accel.parity import Trace as Trace
from neuron_accel.parity import Training as Training
from neuron_accel.parity import compare as compare
from neuron_accel.parity import loader_of as loader_of
from neuron_accel.parity import loss_of as loss_of
from neuron_accel.parity import train_alone as train_alone
from neuron_accel.parity import train_on_rank as train_on_rank

from .ranks import run_ranks


def assert_parallel_equivalence(
    model_fn: Callable[[], nn.Module],
    batches: Batch | Sequence[Batch],
    plugins: Sequence[Any],
    *,
    ranks: int | None = None,
    training: Training | None = None,
    tolerance: Tolerance | None = None,
    backend: str = "gloo",
    reference: Callable[[nn.Module], nn.Module] | None = None,
    timeout: float = 60,
) -> None:
    """Trains ``model_fn()`` in one process, and on ``ranks`` ranks with ``plugins``, and compares the results.

    Args:
        model_fn: importable function that builds the model. It is called after seeding, and must not seed itself.
        batches: keyword arguments of the model's forward, one mapping of tensors per micro-batch (or a single mapping,
            which is used for three steps). Their first dim is sharded over data-parallel ranks. The model has to return
            the mean loss over samples, 0-dim, or an object or mapping with ``loss``.
        plugins: plugin objects, or as in a configuration: names, or ``{name: options}``.
        ranks: number of ranks; None: the product of the degrees of the axes of ``plugins``, at least 2.
        training: options of the training; None: three or more steps with AdamW.
        tolerance: tolerances; None: those of fp32 rounding.
        backend: the kind of ranks, as in :func:`run_ranks`. On ``"xla"`` gradients are not compared, but their norms
            and the weights are.
        reference: importable function that turns the built model into the one that one process trains, for plugins that
            change the function of the model or its trainable parameters (adapters), with the FQNs of the parallel run.
        timeout: time limit of each of the two trainings, in seconds.

    Raises:
        AssertionError: with all differences.
        RanksError: if a rank fails.
    """
    training = training or Training()
    batches = [batches] * 3 * training.accumulation if isinstance(batches, Mapping) else list(batches)
    objects, named = split_plugins(plugins)
    expected = run_ranks(train_alone, 1, model_fn, batches, training, reference, timeout=timeout, backend=None)[0]
    config: dict[str, Any] = {"plugins": named, "backend": "xla" if backend == "xla" else None}
    trace = run_ranks(
        train_on_rank,
        ranks or smallest_world(plugins),
        model_fn,
        batches,
        config,
        training,
        objects,
        gradients=backend != "xla",
        backend=backend,
        timeout=timeout,
    )[0]
    if backend == "xla":
        expected = dataclasses.replace(expected, gradients={})
    compare(expected, trace, tolerance)


def split_plugins(plugins: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Splits plugins into plugin objects, and names or mappings for a configuration."""
    objects = [plugin for plugin in plugins if isinstance(plugin, StrategyPlugin)]
    return objects, [plugin for plugin in plugins if not isinstance(plugin, StrategyPlugin)]


def smallest_world(plugins: Sequence[Any]) -> int:
    """The product of the degrees of the axes of ``plugins`` and their companions, at least 2."""
    objects, named = split_plugins(plugins)
    objects += load_config({"plugins": named}).plugins
    return max(math.prod(axis.degree for plugin in objects for axis in axes_of(plugin)), 2)


def axes_of(plugin: StrategyPlugin) -> list[AxisSpec]:
    """The axes of a plugin and its companions."""
    return [*plugin.axes(), *(axis for companion in plugin.companions() for axis in axes_of(companion))]
