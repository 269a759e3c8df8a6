"""One process at a time on a device: a lock on a file, which ends with the process that holds it.

It keeps timed runs from disturbing each other. Where there can be no lock, runs go on without.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autobatch._folder import Fault, vet_folder

try:
    import fcntl
except ImportError:  # not on this platform
    fcntl = None

PAUSE_S = 0.01
"""Between two tries to lock what another process has locked."""


class DeviceLock:
    """The lock on one device, among the processes that share a folder.

    A thread that holds it may take it again.
    """

    def __init__(self, path: Path) -> None:
        """Opens nothing yet.

        Args:
            path: the file to lock, in the folder of a store; it is made if the folder is there.
        """
        self._path = path
        self._threads = threading.RLock()
        self._depth = 0

    @contextmanager
    def held(self, seconds: float) -> Iterator[bool]:
        """Yields whether the lock is held; after waiting in vain it is not.

        Args:
            seconds: how long to wait, at most.
        """
        give_up = time.monotonic() + seconds
        if not self._threads.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX)):
            yield False
            return
        file: int | None = None
        self._depth += 1
        try:
            if self._depth == 1:
                file = self._locked(give_up)
            yield self._depth > 1 or file is not None
        finally:
            self._depth -= 1
            if file is not None:
                _let_go(file)
            self._threads.release()

    def _locked(self, give_up: float) -> int | None:
        """Returns the descriptor of the locked file; None after waiting in vain, or at a fault."""
        if fcntl is None:
            return None
        try:
            vet_folder(self._path.parent)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except (OSError, Fault):
            return None
        try:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return file
                if time.monotonic() >= give_up:
                    break
                time.sleep(PAUSE_S)
        except OSError:  # the file system has no locks
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)
        return None


def _let_go(file: int) -> None:
    """Unlocks before closing: the child of a fork may have the file open too."""
    assert fcntl is not None
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


_LOCKS: dict[Path, DeviceLock] = {}


def device_lock(path: Path) -> DeviceLock:
    """Returns the lock on a file; the same object for the same path."""
    return _LOCKS.setdefault(path, DeviceLock(path))  # atomic; a lock would not survive a fork
