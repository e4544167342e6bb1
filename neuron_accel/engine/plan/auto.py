# SPDX-License-Identifier: Apache-2.0
"""``plugins="auto"``: rank 0 asks an installed package for the layout of a training, and all ranks follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from neuron_accel.doors import LAYOUT_CHOICES, entry_points, how_to_install, not_installed
from neuron_accel.errors import ConfigurationError, NeuronAccelError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend
    from neuron_accel.engine.plan.hardware import Hardware

AUTO = "auto"
"""The entry of ``plugins`` that asks for it."""


def choose_layout(
    training: Mapping[str, Any],
    backend: Backend,
    hardware: Hardware | None,
    *,
    accumulation: int,
    recorded: Callable[[], Mapping[str, Any] | None],
) -> Mapping[str, Any]:
    """Returns the configuration that rank 0 has chosen, with its plugins and the micro-batches of a step. Collective.

    Args:
        training: what is trained, as the package asks for it.
        backend: connects the ranks.
        hardware: limits of the instance that the run is on or is meant for; None: not known.
        accumulation: micro-batches of a step that the caller asks for; 1 by default.
        recorded: returns the plan of the run that this one continues, if there is one.

    Raises:
        ConfigurationError: on every rank, if no package is installed, or it cannot choose.
    """
    answer: Any = None
    if backend.rank == 0 or not backend.has_values:  # a dry run of one rank receives nothing
        ranks = {"world_size": backend.world_size, "device": backend.device.type, "hardware": hardware}
        try:
            answer = _chooser()(training, **ranks, accumulation=accumulation, recorded=recorded())
        except NeuronAccelError as error:
            answer = error
        except Exception as error:  # the other ranks wait
            answer = ConfigurationError('plugins="auto" has failed.', why=repr(error))
            answer.__cause__ = error
    answer = backend.broadcast_object(answer, backend.new_group([range(backend.world_size)], "world"))
    if isinstance(answer, NeuronAccelError):
        raise answer
    return answer


def _chooser() -> Callable[..., Mapping[str, Any]]:
    for point in entry_points(LAYOUT_CHOICES):
        return point.load()
    raise ConfigurationError(
        'plugins="auto" needs a search of layouts, which is in a package of its own.',
        fix=how_to_install(not_installed(LAYOUT_CHOICES)[0]),
    )
