# SPDX-License-Identifier: Apache-2.0
"""Opting out of checks of the conformance kit, which requires a written reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from ._obligations import PROMISES

SHORTEST = 15
"""Smallest number of characters of a reason."""


def act(request: pytest.FixtureRequest, reasons: Mapping[str, str]) -> None:
    """Skips the requested check if there is a reason for it, and prints the reason, whichever reports pytest shows. A
    reason for one promise of a check is only printed."""
    node: Any = request.node
    for promise in PROMISES:
        key = f"{node.originalname}[{promise}]"
        if key in reasons:
            _print(request, key, reasons[key])
    reason = next((reasons[key] for key in _keys(node) if key in reasons), None)
    if reason is None or len(reason.strip()) < SHORTEST:
        return
    _print(request, node.name, reason)
    pytest.skip(f"opted out: {reason}")


def _print(request: pytest.FixtureRequest, what: str, reason: str) -> None:
    plugins = request.config.pluginmanager
    reporter, capture = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
    if reporter is not None:
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            reporter.ensure_newline()
            reporter.write_line(f"OPTED OUT of {what} ({request.node.cls.__name__}): {reason}")


def _keys(node: Any) -> list[str]:
    backend = getattr(getattr(node, "callspec", None), "params", {}).get("backend")
    return [node.name, node.originalname, f"[{backend}]"]


def problems(cls: type, base: type, compositions: Iterable[str]) -> list[str]:
    """Errors in ``opt_out`` and ``conflicts`` of a class, and checks that it overrides.

    Args:
        cls: the class derived from ``PluginConformance``.
        base: ``PluginConformance``.
        compositions: names of all compositions.
    """
    checks = {name for name in vars(base) if name.startswith("test_")}
    opt_out: Mapping[str, str] = cls.opt_out  # type: ignore[attr-defined]
    conflicts: Mapping[str, str] = cls.conflicts  # type: ignore[attr-defined]
    backends: tuple[str, ...] = ("gloo", "xla", *cls.backends)  # type: ignore[attr-defined]
    known = {
        *compositions,
        *(f"{name}-{backend}" for name in compositions for backend in backends),
        *backends,
    }
    return [
        *(
            f"opt_out contains {key!r}, which is not a check"
            for key in opt_out
            if key.strip("[]") not in backends and key.partition("[")[0] not in checks
        ),
        *(
            f"the reason for {key!r} is {reason!r}; write a sentence that explains why the check cannot hold"
            for key, reason in opt_out.items()
            if len(reason.strip()) < SHORTEST
        ),
        *(f"conflicts contains {key!r}, which is not a composition" for key in conflicts if key not in known),
        *(f"conflicts has no text of the error message for {key!r}" for key in conflicts if not conflicts[key]),
        *(
            f"{cls.__name__} overrides {name}; opt out of it with a reason instead"
            for name in sorted(checks)
            if getattr(cls, name) is not getattr(base, name)
        ),
    ]
