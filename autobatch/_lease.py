"""Who is tuning a workload: a lease in the store, which one process holds at a time.

A lease is text for anybody to read, and no lock: it runs out by itself unless it is renewed, and
one that is damaged, out of date or of a dead process counts for nothing. So the worst that a lost
or a planted one can do is that something is measured twice, or not until it has run out.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from autobatch._store import Store

LASTS_S, RENEWED_S, FARTHEST_S = 10.0, 3.0, 60.0
"""A lease runs out so long after it was renewed, is renewed so often, and none lasts longer."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.25
"""Between two looks at a lease that another holds."""
PATIENCE_S = 1.0
"""How long to wait for a lease by who will do without."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lease, and until when.

    Attributes:
        host: the name of the machine.
        boot: what tells apart the boots of a machine, and on it the containers that number
            processes for themselves; "" where nobody knows.
        pid: the process.
        started: when it started, in the kernel's own count, since numbers are given again.
        token: tells apart the leases of one process.
        expires: seconds since the epoch at which the lease runs out.
    """

    host: str
    boot: str
    pid: int
    started: str
    token: str
    expires: float


def to_text(holder: Holder) -> str:
    """Returns a lease as JSON text."""
    return json.dumps(asdict(holder), sort_keys=True)


def from_text(text: str | None) -> Holder | None:
    """Returns the lease that `to_text` wrote, or None for anything else."""
    try:
        data: Any = json.loads(text or "")
        fields = cast(dict[str, Any], data)
        kinds = {"host": str, "boot": str, "pid": int, "started": str, "token": str}
        if not all(type(fields[name]) is kind for name, kind in kinds.items()):
            return None
        expires = fields.pop("expires")
        if type(expires) not in (int, float):
            return None
        return Holder(**fields, expires=float(expires))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError):
        return None


def is_free(holder: Holder | None, here: Holder, now: float) -> bool:
    """Returns whether a lease counts for nothing.

    Args:
        holder: who holds it; None for nobody.
        here: this process.
        now: seconds since the epoch.
    """
    if holder is None or not now < holder.expires <= now + FARTHEST_S:
        return True
    is_near = here.boot != "" and (holder.host, holder.boot) == (here.host, here.boot)
    return is_near and _started(holder.pid) != holder.started


def this_process() -> Holder:
    """Returns this process as the holder of a lease from now on."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        boot += f" {Path('/proc/self/ns/pid').readlink()}"
    pid = os.getpid()
    return Holder(
        host=os.uname().nodename,
        boot=boot,
        pid=pid,
        started=_started(pid),
        token=secrets.token_hex(8),
        expires=time.time() + LASTS_S,
    )


def _started(pid: int) -> str:
    """Returns when a process started, in the kernel's own count; "" if it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return "" if fields[0] in "ZX" else fields[19]  # the state, and field 22 of proc_pid_stat(5)


class Lease:
    """The lease of one workload, for the time of one `with` block.

    Attributes:
        is_ours: whether this process is to measure: it holds the lease, or there are none where
            it keeps its records.
    """

    def __init__(self, store: Store | None, key: str) -> None:
        """Takes nothing yet.

        Args:
            store: where the lease is kept; None for nowhere.
            key: of the workload.
        """
        self._store, self._key = store, key
        self._mine: Holder | None = None
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None
        self.is_ours = False

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        try:
            if self._renewing is not None:
                self._renewing.join()
        finally:
            if self._mine is not None:
                self._change(lambda _: None)

    def awaited(
        self, seconds: float = PATIENCE_S, look: Callable[[], _T | None] = lambda: None
    ) -> _T | None:
        """Takes the lease as soon as nobody else holds it, or finds what makes that needless.

        Args:
            seconds: how long to wait, at most; by default as who will do without.
            look: returns what this process hopes for from the other one, or None.

        Returns:
            What `look` found, or None. Without it `is_ours` says whether the time was up.
        """
        give_up = time.monotonic() + seconds
        pause = SHORTEST_PAUSE_S
        while True:
            self.is_ours = self._take()
            found = look()  # after taking it: the other one first keeps its record, then lets go
            remaining = give_up - time.monotonic()
            if found is not None or self.is_ours or remaining <= 0:
                return found
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _take(self) -> bool:
        """Returns whether nobody else holds the lease, or none can be held."""
        if self._store is None:
            return True
        here, taken = this_process(), []

        def changed(text: str | None) -> str | None:
            if not is_free(from_text(text), here, time.time()):
                return text
            taken.append(here)
            return to_text(here)

        if not self._store.change_lease(self._key, changed, create=True):
            return True
        if not taken:
            return False
        self._mine = here
        self._renewing = threading.Thread(target=self._renew, name="autobatch-lease", daemon=True)
        try:
            self._renewing.start()
        except RuntimeError:  # no more threads: it may run out, and that is all
            self._renewing = None
        return True

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_S):
            self._change(lambda mine: replace(mine, expires=time.time() + LASTS_S))

    def _change(self, changed: Callable[[Holder], Holder | None]) -> None:
        """Changes the lease if it is still this one's."""
        assert self._store is not None
        assert self._mine is not None
        token = self._mine.token

        def change(text: str | None) -> str | None:
            holder = from_text(text)
            if holder is None or holder.token != token:
                return text  # it ran out, and another process has taken it
            after = changed(holder)
            return None if after is None else to_text(after)

        self._store.change_lease(self._key, change)
