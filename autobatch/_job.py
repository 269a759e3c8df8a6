"""What a tuning is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autobatch._program import Program
from autobatch._record import Data, Limits, Record
from autobatch._strategies import Strategy
from autobatch._workload import Workload

NewProgram = Callable[[], Program]
"""Returns a fresh program of the mapped function."""


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


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a tuning found, and the programs that it compiled."""

    record: Record
    programs: Mapping[Strategy, Program]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a tuning, with the record of what had been measured by then."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
