# SPDX-License-Identifier: Apache-2.0
"""``accelerate.Accelerator``, imported once the backend is chosen: Accelerate chooses its device when it is imported.

Modules at which a program may enter this package import this one first. Type checkers read ``accelerate.pyi``, since
Accelerate ships no types and any name on an accelerator would pass.
"""

from __future__ import annotations

import os

from neuron_accel.backends.select import settle

settle(os.environ)

from accelerate import Accelerator  # noqa: E402

__all__ = ["Accelerator"]
