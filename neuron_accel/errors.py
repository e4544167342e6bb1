"""The errors that users meet.

Every one of them says what is wrong, where, why it matters and what to do. They derive from one base class, so that
``except NeuronAccelError`` catches exactly what this project raises on purpose.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NeuronAccelError(Exception):
    """Base class of this project's errors.

    Args:
        what: one sentence, what is wrong.
        where: the file and key, plugin and distribution, or rank that it concerns.
        why: the reason this cannot simply be accepted.
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
    """A key, type or value of the configuration is not usable."""


class PluginError(NeuronAccelError):
    """A plugin cannot be found, loaded, or speaks another version of the contract."""


class PlanError(NeuronAccelError):
    """The plugins asked for cannot run together, or not on this many ranks."""


class LayoutError(NeuronAccelError):
    """A tensor cannot be sharded as requested."""


class UnsupportedModelError(NeuronAccelError):
    """No plan is known that covers this model."""


class ParameterError(NeuronAccelError):
    """An optimizer and a prepared model disagree about parameters."""


class UsageError(NeuronAccelError):
    """A call that makes no sense in the state the run is in."""


class DesyncError(NeuronAccelError):
    """Ranks that must agree do not."""


class RecompileError(NeuronAccelError):
    """A training step became a graph that was not compiled before, although it should be done with that."""


class NonFiniteError(NeuronAccelError):
    """A gradient contains NaN or infinity."""


class CommunicationError(NeuronAccelError):
    """A collective failed, most often because a peer is gone."""


class CheckpointError(NeuronAccelError):
    """A checkpoint cannot be written or read."""


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.4) -> str:
    """``"Did you mean 'x'? Known: a, b, x."`` for a misspelt ``word``.

    Args:
        word: what was written.
        known: what could have been.
        cutoff: how alike the nearest must be to be named, 0 to 1 (:func:`difflib.get_close_matches`).
    """
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    listing = f"Known: {', '.join(names)}." if names else "None is known."
    return f"Did you mean {near[0]!r}? {listing}" if near else listing
