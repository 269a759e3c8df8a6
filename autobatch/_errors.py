"""Errors and the warning that a caller may want to catch, how often one warns, what errors say."""

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


# What XLA says where it planned the buffer, and where a library inside asked for it ("failed to
# allocate", "allocation failed"); YNNPACK says why only to the terminal.
_OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED",
    "out of memory",
    "Out of memory",
    "llocat",
    "YNNPACK operation failed",
)

_WARNED: set[str] = set()


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says, in one of the ways that it is said, that memory ran out.

    >>> is_out_of_memory(RuntimeError("INTERNAL: buffer allocation failed"))
    True
    """
    return isinstance(error, MemoryError) or any(each in str(error) for each in _OUT_OF_MEMORY)


def warn_once(message: str) -> None:
    """Warns the user, once per process and text."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(f"autobatch: {message}", AutobatchWarning, stacklevel=2)
