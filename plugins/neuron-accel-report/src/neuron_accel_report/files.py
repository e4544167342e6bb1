# SPDX-License-Identifier: Apache-2.0
"""Files that are written whole."""

from __future__ import annotations

import os
from pathlib import Path

from neuron_accel.errors import ConfigurationError


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file that is either as before or complete, also if the process is killed.

    Raises:
        ConfigurationError: if it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror or error}.", where="--output", fix="name another"
        ) from error
