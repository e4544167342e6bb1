# SPDX-License-Identifier: Apache-2.0
"""What makes the memory of a layout smaller: every change of one strategy is counted, by a dry run of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from neuron_accel.contract import AxisKind, StrategyPlugin
from neuron_accel.errors import NeuronAccelError
from neuron_accel_plan.candidates import Layout, configurations, exclude, offering, text
from neuron_accel_plan.dry_runs import is_ours
from neuron_accel_plan.layout import LayoutCount, Planner


@dataclass(frozen=True, kw_only=True)
class Change:
    """A layout that differs by one strategy.

    Args:
        what: the difference.
        layout: the layout.
        count: what it needs.
    """

    what: str
    layout: Layout
    count: LayoutCount


def smaller(planner: Planner, counted: LayoutCount, layout: Layout) -> list[Change]:
    """Returns the changes of a layout that make its peak smaller, the smallest first. Each is counted by one step,
    which is approximate: see ``quick`` of :meth:`Planner.count`.

    Args:
        planner: counts.
        counted: the count of the layout.
        layout: the layout.
    """
    found = []
    for what, changed in _changes(planner, layout):
        try:
            count = planner.count(changed.plugins, changed.accumulation, quick=True)
        except NeuronAccelError:
            continue  # not possible for this model, batch or machine
        except (RuntimeError, ValueError, TypeError) as error:
            if is_ours(error):
                raise
            continue  # the model's code, or torch's for a device without values, cannot run so
        if count.step.peak.total < 0.99 * counted.step.peak.total:
            found.append(Change(what=what, layout=changed, count=count))
    return sorted(found, key=lambda change: change.count.step.peak.total)


def _changes(planner: Planner, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Twice the micro-batches; each strategy that is not used, as it is or of the smallest degree, with those that it
    makes possible; the next larger degree of one that is; and the options that save memory."""
    plugins = tuple(part for plugin in layout.plugins for part in (plugin.companions() or (plugin,)))
    stages = [plugin for plugin in plugins if any(axis.kind is AxisKind.STAGE for axis in plugin.axes())]
    if not stages:
        number = 2 * layout.accumulation
        yield f"accumulation {number}", Layout(plugins=plugins, accumulation=number)
    for plugin in plugins:
        if layout.accumulation > 1 and getattr(plugin, "use_grad_acc_hook", None) is False:
            sharded = dataclasses.replace(plugin, use_grad_acc_hook=True)  # type: ignore[call-arg]
            replaced = tuple(sharded if each is plugin else each for each in plugins)
            yield text(sharded), Layout(plugins=replaced, accumulation=layout.accumulation)
    for cls in offering():
        present = next((plugin for plugin in plugins if type(plugin) is cls), None)
        others = tuple(p for p in plugins if p is not present and not exclude(cls, type(p)))
        options = list(configurations(cls, planner.space(others)))
        degrees = sorted((p for p in options if _degree(p) > _degree(present)), key=_degree)
        if degrees:
            options = degrees[:1]
        elif present is not None:
            continue
        for option in options:
            gone = [p.spec.name for p in plugins if p is not present and p not in others]
            what = text(option) + (f" instead of {', '.join(gone)}" if gone else "")
            changed = Layout(plugins=_in_order((*others, option)), accumulation=layout.accumulation)
            yield what, changed
            for following in offering():
                chosen = any(type(p) is following for p in changed.plugins)
                if chosen or configurations(following, planner.space(others)):
                    continue
                for more in configurations(following, planner.space(changed.plugins)):
                    both = Layout(plugins=_in_order((*changed.plugins, more)), accumulation=layout.accumulation)
                    yield f"{what}, {text(more)}", both


def _degree(plugin: StrategyPlugin | None) -> int:
    degree = 1
    for axis in () if plugin is None else plugin.axes():
        degree *= axis.degree
    return degree


def _in_order(plugins: Sequence[StrategyPlugin]) -> tuple[StrategyPlugin, ...]:
    return tuple(sorted(plugins, key=lambda plugin: (plugin.spec.phase, plugin.spec.name)))
