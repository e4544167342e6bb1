# SPDX-License-Identifier: Apache-2.0
"""Finds the configuration of a model by its name, without torch and transformers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from neuron_accel.errors import ConfigurationError

KNOWN_MODELS = Path(__file__).parent / "known_models.json"
"""Configurations of popular models by name, as published with their weights, without what does not change a count."""


def known_models() -> dict[str, dict[str, Any]]:
    """Returns the configurations that this package has, by name."""
    found: dict[str, dict[str, Any]] = json.loads(KNOWN_MODELS.read_text(encoding="utf-8"))
    return found


def find_model(model: str | os.PathLike[str]) -> Path | dict[str, Any]:
    """Returns the file with the configuration of a model, or the configuration of a known name.

    Args:
        model: a folder with a ``config.json``, that file, a name of :func:`known_models`, or one of Hugging Face's hub
            that is in its cache.

    Raises:
        ConfigurationError: if there is none.
    """
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return file
    known = known_models()
    return known.get(str(model).lower()) or _cached(str(model), known)


def _cached(name: str, known: Iterable[str]) -> Path:
    """The config.json of a model of Hugging Face's hub, where its cache has it."""
    from huggingface_hub import try_to_load_from_cache

    of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()
    found = try_to_load_from_cache(name, "config.json") if of_hub else None
    if isinstance(found, str):
        return Path(found)
    fix = f"pass a folder with a config.json of transformers, that file, or one of {', '.join(known)}"
    raise ConfigurationError(
        f"There is no model {name}.",
        where="model",
        why="the configuration of a model is read from disk; nothing is downloaded, and no weights are needed",
        fix=f"fetch 1 KB with `hf download {name} config.json`, or {fix}" if of_hub else fix,
    )
