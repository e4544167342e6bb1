# SPDX-License-Identifier: Apache-2.0
"""The exceptions of this package.

The message of each states what is wrong, where, why it matters and what to do. All derive from one base class, so that
``except NeuronAccelError`` catches every error that this package raises deliberately, and no other.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "ConfigurationError",
    "CorruptionError",
    "DesyncError",
    "LayoutError",
    "NeuronAccelError",
    "NonFiniteError",
    "ParameterError",
    "PlanError",
    "PluginError",
    "RecompileError",
    "UnsupportedModelError",
    "UsageError",
    "did_you_mean",
]


class NeuronAccelError(Exception):
    """Base class of this package's errors.

    Args:
        what: one sentence that states what is wrong.
        where: the file and key, the plugin and its distribution, or the rank concerned.
        why: the reason why this cannot be accepted.
        fix: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        lines = [what]
        for label, text in (("where", where), ("why", why), ("fix", fix)):
            if text:
                lines.append(f"  {label}: {text}")
        super().__init__("\n".join(lines))

    def __reduce__(self):  # the keyword-only parts survive pickling, so a rank's error can cross a process boundary
        return _rebuild, (type(self), self.what, self.where, self.why, self.fix)


def _rebuild(cls, what, where, why, fix):
    return cls(what, where=where, why=why, fix=fix)


class ConfigurationError(NeuronAccelError):
    """A key, a type or a value of the configuration is not valid."""


class PluginError(NeuronAccelError):
    """A plugin cannot be found or loaded, or requires another version of the contract."""


class PlanError(NeuronAccelError):
    """The requested plugins cannot be combined, or cannot run on this number of ranks."""


class LayoutError(NeuronAccelError):
    """A tensor cannot be sharded as requested."""


class UnsupportedModelError(NeuronAccelError):
    """There is no plan that covers this model."""


class ParameterError(NeuronAccelError):
    """The parameters of an optimizer do not match those of a prepared model."""


class UsageError(NeuronAccelError):
    """A method was called at a time, or with an argument, for which it is not valid."""


class DesyncError(NeuronAccelError):
    """Values that must be equal on several ranks differ."""


class RecompileError(NeuronAccelError):
    """A training step produced a new graph and was compiled after compilation should have been complete."""


class NonFiniteError(NeuronAccelError):
    """A gradient contains NaN or infinity."""


class CorruptionError(NeuronAccelError):
    """Values of a rank changed although nothing wrote them, or a sum over ranks is not the sum of what they sent."""


class CommunicationError(NeuronAccelError):
    """A collective failed, most often because another rank has ended."""


class CheckpointError(NeuronAccelError):
    """A checkpoint cannot be written or read."""


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.4) -> str:
    """Returns a suggestion for a misspelt ``word``, such as ``"Did you mean 'x'? Known: a, b, x."``.

    Args:
        word: the word that was given.
        known: the words that are valid.
        cutoff: similarity from 0 to 1 that a suggestion must reach, as in :func:`difflib.get_close_matches`.
    """
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    listing = f"Known: {', '.join(names)}." if names else "None is known."
    return f"Did you mean {near[0]!r}? {listing}" if near else listing
