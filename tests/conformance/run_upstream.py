"""Runs a script of Accelerate's own, unmodified, with ``Accelerator`` replaced by ``NeuronAccelerator``.

Usage: ``python run_upstream.py SCRIPT [--plugins name,name]``, on one rank or under a launcher. SCRIPT is relative to
``accelerate/test_utils/scripts``.
"""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
from pathlib import Path

import neuron_accel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script")
    parser.add_argument("--plugins", default="")
    options, rest = parser.parse_known_args()
    accelerator_class = neuron_accel.NeuronAccelerator

    import accelerate

    names = [name for name in options.plugins.split(",") if name]
    replacement = accelerator_class
    if names:
        # A subclass, so that isinstance checks in the scripts keep working.
        class WithPlugins(accelerator_class):  # type: ignore[misc, valid-type]
            @functools.wraps(accelerator_class.__init__)
            def __init__(self, **kwargs):
                super().__init__(**{"config": {"plugins": names}, **kwargs})

        replacement = WithPlugins
    accelerate.Accelerator = accelerate.accelerator.Accelerator = replacement
    script = Path(accelerate.__file__).parent / "test_utils" / "scripts" / options.script
    sys.argv = [str(script), *rest]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
