# SPDX-License-Identifier: Apache-2.0
"""What happens in a run, and who follows it."""

from neuron_accel.backends.events import Collective, Event, Events, Observer, Traffic, Transfer

__all__ = ["Collective", "Event", "Events", "Observer", "Traffic", "Transfer"]
