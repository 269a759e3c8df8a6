"""Whether this thread is describing or tuning a mapped function right now.

What follows from it is decided in `_synthetic`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STATE = threading.local()


def is_busy() -> bool:
    """Returns whether a mapped function is being described or tuned in this thread.

    A mapped function that is called meanwhile is part of another one, and measures nothing.
    """
    return getattr(_STATE, "is_busy", False)


@contextmanager
def busy() -> Iterator[None]:
    """Marks this thread as describing or tuning."""
    before = is_busy()
    _STATE.is_busy = True
    try:
        yield
    finally:
        _STATE.is_busy = before
