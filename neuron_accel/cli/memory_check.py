# SPDX-License-Identifier: Apache-2.0
"""Checks whether a launch fits into memory, by a dry run of its script in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from neuron_accel.doors import COMMANDS, entry_points, how_to_install, offered_by
from neuron_accel.errors import ConfigurationError
from neuron_accel.launch.plan import LaunchPlan
from neuron_accel.neuron.environment import INSTANCE_VARIABLE
from neuron_accel.neuron.instances import detect_instance, find_instance

COMMAND = "plan"


def check_memory(plan: LaunchPlan, environ: Mapping[str, str] = os.environ) -> str:
    """Dry-runs the script up to its second optimizer step by ``neuron-accel plan``, which compares the peak of rank 0
    with the memory of a core.

    Args:
        plan: what is to be launched.
        environ: environment variables.

    Returns:
        the result as text, or the reason why the dry run failed.

    Raises:
        ConfigurationError: if the command is not installed, or the instance is not known.
    """
    if all(point.name != COMMAND for point in entry_points(COMMANDS)):
        raise ConfigurationError(
            f"--check-memory needs the command {COMMAND!r}, which is in a package of its own.",
            fix=how_to_install(offered_by(COMMANDS, COMMAND) or ""),
        )
    request = plan.request
    named = request.instance or environ.get(INSTANCE_VARIABLE, "").strip()
    instance = find_instance(named) if named else detect_instance()
    if instance is None:
        raise ConfigurationError(
            "--check-memory needs an instance: it compares the peak with the memory of a core.", fix="add --instance"
        )
    words = [COMMAND, request.target, "--brief", "--instance", instance.name]
    words += [*(["--module"] if request.module else []), *(["--lnc", str(request.lnc)] if request.lnc else [])]
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
    return done.stdout.rstrip()
