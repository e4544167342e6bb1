# SPDX-License-Identifier: Apache-2.0
"""Facts about Trainium and its SDK, from ``facts.json``: instances, limits, releases, compiler options, variables.

Each row names its source, whose address and date (of its last change, or of reading it) are listed there. Where two
sources disagree, the smaller set of possibilities is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FACTS: Mapping[str, Any] = json.loads(Path(__file__).with_name("facts.json").read_text("utf-8"))
SDK: str = FACTS["sdk"]["release"]
"""The release of the Neuron SDK for which this was written."""
