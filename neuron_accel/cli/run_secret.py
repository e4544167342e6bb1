# SPDX-License-Identifier: Apache-2.0
"""The secret of a run, by which the launchers of its machines recognise each other.

It comes from the environment variable ``NEURON_ACCEL_SECRET``, which a batch file sets and a scheduler passes on, or
from a file that only its owner can read, on a file system that the machines share. It is never an argument of a
command, since every user of a machine can list those.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import MutableMapping
from pathlib import Path

from neuron_accel.errors import ConfigurationError

VARIABLE = "NEURON_ACCEL_SECRET"
OPTION = "--secret-file"
SHORTEST, LONGEST = 16, 4096


class RunSecret:
    """Where the secret of a run is read.

    Args:
        value: the secret itself, in bytes; None if it is in ``file``.
        file: a file with the secret, which may not exist yet.
    """

    def __init__(self, value: bytes | None, file: Path | None = None) -> None:
        self._value, self._file = value, file
        self._made: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"RunSecret({'from ' + str(self._file) if self._file else 'given'})"

    def make(self) -> None:
        """Writes a new secret to the file if it does not exist, readable by its owner only. Called on machine 0.

        Raises:
            ConfigurationError: if the file cannot be written, or exists and is not a valid secret.
        """
        if self._file is None:
            return
        partial = self._file.with_name(f"{self._file.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.fchmod(descriptor, 0o600)  # whatever the umask is
                os.write(descriptor, secrets.token_hex(32).encode() + b"\n")
                made = os.fstat(descriptor)
            finally:
                os.close(descriptor)
            try:
                os.link(partial, self._file)  # complete, or not there; an existing one stays
                self._made = (made.st_dev, made.st_ino)
            except FileExistsError:
                pass
            finally:
                os.unlink(partial)
        except OSError as error:
            raise ConfigurationError(
                f"{self._file} cannot be written: {error.strerror}.",
                where=OPTION,
                why="machine 0 writes the secret of the run to it",
                fix=f"pass a file in a folder that all machines share and you can write, or set {VARIABLE}",
            ) from None
        if self.read() is None:
            raise ConfigurationError(f"{self._file} disappeared while it was read.", where=OPTION, fix="launch again")

    def read(self) -> bytes | None:
        """The secret; None if its file does not exist yet.

        Raises:
            ConfigurationError: if others can read the file, or its content is too short or too long.
        """
        if self._file is None:
            return self._value
        try:
            descriptor = os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(self._file, f"cannot be opened: {error.strerror}") from None
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise _unusable(self._file, "is not a file")
            if facts.st_uid != os.geteuid():
                raise _unusable(self._file, "belongs to another user")
            if facts.st_mode & 0o077:
                raise _unusable(self._file, f"can be read by others (mode {stat.S_IMODE(facts.st_mode):04o})")
            return _checked(os.read(descriptor, LONGEST + 1), str(self._file))
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Removes the file if :meth:`make` has written it."""
        if self._file is None or self._made is None:
            return
        with contextlib.suppress(OSError):
            facts = os.stat(self._file)
            if (facts.st_dev, facts.st_ino) == self._made:
                os.unlink(self._file)


def take_secret(environ: MutableMapping[str, str], file: str | None) -> RunSecret | None:
    """The secret of a run; it is removed from ``environ``, so that ranks do not inherit it.

    Args:
        environ: environment variables.
        file: the file of ``--secret-file``; it is preferred.

    Raises:
        ConfigurationError: if the variable is too short or too long.
    """
    value = environ.pop(VARIABLE, "")
    if file is not None:
        return RunSecret(None, Path(file))
    return RunSecret(_checked(value.encode(errors="surrogateescape"), VARIABLE)) if value.strip() else None


def _checked(text: bytes, where: str) -> bytes:
    text = text.strip()
    if not SHORTEST <= len(text) <= LONGEST:
        raise ConfigurationError(
            f"The secret of the run has {'more than 4096' if len(text) > LONGEST else len(text)} characters.",
            where=where,
            why="a short one can be guessed",
            fix=f"use {SHORTEST} to {LONGEST} characters, such as the output of `openssl rand -hex 32`",
        )
    return text


def _unusable(file: Path, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{file} {what}.",
        where=OPTION,
        why="anyone who knows the secret of a run can end it",
        fix="pass a path that does not exist, where machine 0 creates the file, or a file of yours with mode 0600",
    )
