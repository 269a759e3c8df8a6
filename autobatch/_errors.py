"""The errors and the warning that a caller may want to catch, and how often they are warned."""

from __future__ import annotations

import warnings


class AutobatchError(ValueError):
    """Base of every error that is autobatch's own.

    Misuse raises what `jax.vmap` raises (`ValueError`, `TypeError`), not this.
    """


class IneligibleStrategyError(AutobatchError):
    """A forced strategy cannot keep the meaning of `jax.vmap` for this function."""


class NoViableStrategyError(AutobatchError):
    """No strategy fits the explicit limits of the budget."""


class RecordMissError(AutobatchError):
    """`tune="require"` found no record of this workload."""


class AutobatchWarning(UserWarning):
    """Something works less well than it could; the text says what to do about it."""


_WARNED: set[str] = set()


def warn_once(message: str) -> None:
    """Warns the user, once per process and text."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(f"autobatch: {message}", AutobatchWarning, stacklevel=2)
