"""A plan, and a prepared model, as text."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from neuron_accel.engine.plan.mesh import Mesh
from neuron_accel.engine.plan.plan import Plan
from neuron_accel.engine.plan.plugin import HOOKS, Claim, StrategyPlugin, overrides

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord

WIDTH = 110
SHOWN_GROUPS = 4
SHOWN_RANKS = 8
_SEGMENT = re.compile(r"(?<=\.)\d+(?=\.)")


def explain(plan: Plan) -> str:
    """What ``plan`` decided and why, in sections: mesh, plugins, owners, and what happens in order."""
    ranks = plan.mesh.world_size
    lines = [f"Plan for {ranks} rank{'s' if ranks > 1 else ''}: {plan.mesh}", ""]
    lines += ["Mesh, outer to inner axis", *_mesh(plan.mesh), ""]
    lines += ["Plugins, in the order in which they act", *(_plugins(plan) or ["  none"]), ""]
    lines += ["Responsibilities and their owners", *_owners(plan), ""]
    lines += ["What each plugin does, in the order in which it happens", *(_moments(plan) or ["  nothing"]), ""]
    lines += [f"Fingerprint {plan.fingerprint()[:16]}"]
    return "\n".join(lines)


def explain_parameters(prepared: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
    """The placement of every parameter of a prepared model, and what the plugins report about its modules.

    Args:
        tokens: number of tokens of this rank in a step; plugins then report bytes per step instead of per token.

    Equal parameters of repeated blocks are one row, with ``*`` for the block's number.
    """
    rows: dict[tuple[str, ...], list[int]] = {}
    for record in prepared.parameters:
        bytes_ = 0 if record.current is None else record.current.numel() * record.current.element_size()
        key = (_SEGMENT.sub("*", record.fqn), record.rule or "-", *_layout(record))
        rows.setdefault(key, []).append(bytes_)
    table = [("parameter", "times", "rule", "placement", "shape", "local shape", "gradient", "local bytes")]
    for (name, rule, how, shape, here, gradient), each in rows.items():
        table.append((name, str(len(each)), rule, how, shape, here, gradient, f"{sum(each):,}"))
    total = sum(sum(each) for each in rows.values())
    lines = [f"Parameters on rank {run.backend.rank}: {total:,} bytes", *_table(table)]
    for explain_model in run.hooks["explain_model"]:
        text = explain_model(prepared, run, tokens=tokens)
        lines += ["", text] if text else []
    return "\n".join(lines)


def _layout(record: ParameterRecord) -> tuple[str, str, str, str]:
    """A parameter's placement, its shape, its shape on this rank, and the axes over which its gradient is summed."""
    cuts = []
    for cut in record.layout.cuts:
        extra = [f"{cut.replicas} replicas of each shard"] if cut.replicas > 1 else []
        extra += ["padded"] if cut.local_size * cut.parts != cut.size else []
        extra += [f"{len(cut.blocks)} blocks"] if len(cut.blocks) > 1 else []
        cuts.append(f"Shard({cut.dim}) over {cut.axis}" + (f" ({', '.join(extra)})" if extra else ""))
    cuts += [f"{axis} {', '.join(map(str, indices))} only" for axis, indices in record.holders.items()]
    here = "-" if record.current is None else str(tuple(record.current.shape))
    summed = f"summed over {', '.join(record.partial_axes)}" if record.partial_axes else "-"
    return "; ".join(cuts) or "Replicate", str(record.layout.shape), here, summed


def _mesh(mesh: Mesh) -> list[str]:
    rows = [("axis", "degree", "kind", "groups of ranks")]
    for axis in mesh.axes:
        groups = mesh.groups(axis.name) if axis.degree > 1 else ()
        rows.append((axis.name, str(axis.degree), axis.kind.value, _groups(groups) if groups else "-"))
    return _table(rows)


def _groups(groups: Sequence[Sequence[int]]) -> str:
    if len(groups) <= SHOWN_GROUPS:
        return " ".join(_group(group) for group in groups)
    first, second, last = (_group(group) for group in (groups[0], groups[1], groups[-1]))
    return f"{first} {second} ... {last} ({len(groups)} groups of {len(groups[0])})"


def _group(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks]
    if len(shown) > SHOWN_RANKS:
        shown = [*shown[:3], "...", shown[-1]]
    return "{" + " ".join(shown) + "}"


def _plugins(plan: Plan) -> list[str]:
    lines = []
    for number, plugin in enumerate(plan.plugins, start=1):
        name = plugin.spec.name
        source = plan.provenance.get(name)
        lines.append(f"  {number}. {name}" + (f"  ({source})" if source else ""))
        lines += _indented(f"place: {plan.reasons.get(f'plugins.{name}', 'not recorded')}")
        axes = ", ".join(f"{axis.name} {axis.degree}" for axis in plugin.axes())
        lines += _indented(f"axes: {axes}") if axes else []
        options = ", ".join(_options(plugin))
        lines += _indented(f"options: {options or 'all at their defaults'}")
    return lines


def _options(plugin: StrategyPlugin) -> Iterable[str]:
    for f in dataclasses.fields(plugin):
        value = getattr(plugin, f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if f.init and f.repr and (default is dataclasses.MISSING or value != default):
            yield f"{f.name}={value!r}"


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * 5, subsequent_indent=" " * 9, break_long_words=False)


def _moments(plan: Plan) -> list[str]:
    rows = [("when", "plugin", "what it does")]
    for name, moment in HOOKS.items():
        acting = (
            plan.plugins
            if moment.owner is None
            else [p for p in plan.plugins if plan.owners.get(moment.owner) == p.spec.name]
        )
        rows += [(moment.text, p.spec.name, _first_sentence(p, name)) for p in acting if overrides(p, name)]
    return _table(rows) if len(rows) > 1 else []


def _first_sentence(plugin: StrategyPlugin, name: str) -> str:
    """The first sentence of a hook's docstring; the hook's name if it has none."""
    doc = getattr(type(plugin), name).__doc__ or name
    sentence = re.split(r"(?<=[a-z)`])[.:](?:\s|$)", " ".join(doc.split()), maxsplit=1)[0]
    return textwrap.shorten(sentence, WIDTH - 45, placeholder=" ...")


def _owners(plan: Plan) -> list[str]:
    rows = [("responsibility", "owner", "why")]
    for claim in Claim:
        owner = plan.owners.get(claim)
        # What no plugin owns is done as in any program of PyTorch.
        default = "autograd (default)" if claim is Claim.BACKWARD else "no plugin claims it"
        why = plan.reasons.get(f"owners.{claim.value}", "not recorded" if owner else default)
        rows.append((claim.value, owner or "-", why))
    return _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
