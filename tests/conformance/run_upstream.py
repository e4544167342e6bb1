"""Runs a script of Accelerate's own, unmodified, with ``Accelerator`` replaced by ``NeuronAccelerator``.

Usage: ``python run_upstream.py SCRIPT [--plugins name,name]``, on one rank or under a launcher. SCRIPT is relative to
``accelerate/test_utils/scripts``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import runpy
import sys
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script")
    parser.add_argument("--plugins", default="")
    options, rest = parser.parse_known_args()
    os.environ["CONFORMANCE_PLUGINS"] = options.plugins
    swapped = importlib.import_module("swapped")  # before accelerate: it settles the backend
    accelerate = importlib.import_module("accelerate")
    accelerate.Accelerator = accelerate.accelerator.Accelerator = swapped.SwappedAccelerator
    if options.script == "test_ops.py":
        swapped.SwappedAccelerator()  # by itself the script runs in a world of one
    if any(importlib.util.find_spec(name) is None for name in ("datasets", "evaluate")):
        sys.path.append(str(STAND_INS))
    script = Path(accelerate.__file__).parent / "test_utils" / "scripts" / options.script
    sys.argv = [str(script), *rest]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
