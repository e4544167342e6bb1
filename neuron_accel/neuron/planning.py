"""What the planner is told about the machines of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_accel.engine.errors import ConfigurationError
from neuron_accel.neuron.environment import INSTANCE_VARIABLE
from neuron_accel.neuron.instances import PRODUCT_NAME, detect_instance, find_instance

if TYPE_CHECKING:
    from neuron_accel.backends.select import Decision
    from neuron_accel.engine.hardware import Hardware


def hardware_of_run(
    environ: Mapping[str, str], decision: Decision, product_name: Path = PRODUCT_NAME
) -> Hardware | None:
    """The limits of the instance that NEURON_ACCEL_INSTANCE names, on any device, so that a plan can be tried before
    one is rented; else, on a Neuron device, of the instance that this is. None where there are none to keep.

    Raises:
        ConfigurationError: for an instance or a logical configuration that does not exist.
    """
    named = environ.get(INSTANCE_VARIABLE, "").strip()
    if named:
        instance = find_instance(named, INSTANCE_VARIABLE)
    elif decision.device in ("neuron", "xla") and environ.get("PJRT_DEVICE", "NEURON") == "NEURON":
        instance = detect_instance(product_name)
    else:
        instance = None
    return None if instance is None else instance.hardware(_lnc(environ) if len(instance.lnc) > 1 else None)


def _lnc(environ: Mapping[str, str]) -> int | None:
    name = "NEURON_LOGICAL_NC_CONFIG"
    text = environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise ConfigurationError(
            f"{name}={text} is no number.", where=f"environment variable {name}", fix="give 1 or 2"
        )
    return int(text) if text else None
