# SPDX-License-Identifier: Apache-2.0
"""Checks whether a launch fits into memory, by a dry run of its script in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from neuron_accel.cli.launch_plan import LaunchPlan
from neuron_accel.cli.plan import LESS
from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.environment import INSTANCE_VARIABLE
from neuron_accel.neuron.instances import Instance, detect_instance, find_instance


def check_memory(plan: LaunchPlan, environ: Mapping[str, str] = os.environ) -> str:
    """Dry-runs the script up to its second optimizer step, as ``neuron-accel plan`` does, and compares the peak of rank
    0 with the memory of a core.

    Args:
        plan: what is to be launched.
        environ: environment variables.

    Returns:
        the result as text, or the reason why the dry run failed.

    Raises:
        ConfigurationError: if the instance is not known.
    """
    request = plan.request
    named = request.instance or environ.get(INSTANCE_VARIABLE, "").strip()
    instance = find_instance(named) if named else detect_instance()
    if instance is None:
        raise ConfigurationError(
            "--check-memory compares with the core of an instance, which is not known.", fix="add --instance"
        )
    words = ["plan", request.target, "--json", "--instance", instance.name, *(["--module"] if request.module else [])]
    words += ["--nproc-per-node", str(request.nproc_per_node), "--nnodes", str(request.nnodes)]
    done = subprocess.run(
        [sys.executable, "-m", "neuron_accel.cli.main", *words, "--", *request.arguments],
        env={**environ, **{setting.name: setting.value for setting in plan.settings}},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1) or not done.stdout:
        return f"the memory of a rank is not known, since the dry run of the script failed:\n{done.stderr.rstrip()}"
    return compare(json.loads(done.stdout)["memory"], instance, request.lnc)


def compare(memory: Mapping[str, Any], instance: Instance, lnc: int | None) -> str:
    """Returns a sentence that says whether a rank fits.

    Args:
        memory: the total, in bytes, and the parts, as ``neuron-accel plan --json`` prints them.
        instance: the instance.
        lnc: physical cores in a logical core; None: the instance's default.
    """
    total, room, parts = memory["total"], instance.core_bytes(lnc), memory["parts"]
    what = f"{total / 2**30:.3g} GiB at the peak of the second step of rank 0"
    core = f"the {room / 2**30:.3g} GiB of a core of {instance.name}"
    if total <= room:
        return f"memory: {what}, {total / room:.0%} of {core}; without the memory of the runtime and of compiled graphs"
    largest = max(parts, key=lambda part: parts[part])
    return (
        f"WARNING: this run does NOT fit: {what}, more than {core}; "
        f"the largest part, {largest}, becomes smaller with {LESS[largest]}"
    )
