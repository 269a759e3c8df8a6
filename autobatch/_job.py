"""What a tuning is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from autobatch._program import Prepared
from autobatch._record import Data, Limits, Record
from autobatch._strategies import Strategy
from autobatch._workload import Workload

NewProgram = Callable[[], Prepared]
"""Returns a fresh program of the mapped function."""

Phase = Literal["compile", "wait", "run", "time"]
"""What a candidate is about to go through."""


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """What another process does for a tuning: it ends candidates that do not end by themselves.

    So strategies that may not end are tried too, and this process may die at any candidate.

    Attributes:
        trying: told which candidates are next to be compiled, to wait until no other process runs
            its own, to be run, or to be timed together.
        learnt: told the record as it would stand if this process ended now.
        known: what an earlier process, which a candidate ended, had told last.
    """

    trying: Callable[[Sequence[Strategy], Phase], None]
    learnt: Callable[[Record], None]
    known: Record | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be tuned.

    Attributes:
        workload: the described call.
        arrays: those of the call, or stand-ins.
        device: the `jax.Device` they are worked on.
        limits: the budget on this device.
        key, parts, name: as the record holds them.
        new_program: returns a fresh program; candidates never compile on one in service.
        also: strategies to measure besides those that the search picks.
        data: whether `arrays` are the caller's arrays or stand-ins.
        supervision: by another process, if there is one.
        alone: returns what is held while candidates run, so that no other process's do; it waits
            for that so many seconds at most.
    """

    workload: Workload
    arrays: tuple[Any, ...]
    device: Any
    limits: Limits
    key: str
    parts: Mapping[str, Any]
    name: str
    new_program: NewProgram
    also: tuple[Strategy, ...] = ()
    data: Data = "real"
    supervision: Supervision | None = None
    alone: Callable[[float], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a tuning found, and the programs that it compiled."""

    record: Record
    programs: Mapping[Strategy, Prepared]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a tuning, with the record of what had been measured by then."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
