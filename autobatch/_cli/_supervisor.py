"""Has candidates tried in a child process, and makes outcomes of crashes and of what never ends.

What the child does is in `_worker`. Nothing here, nor anything it imports, needs jax.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from autobatch._cli._request import Request
from autobatch._record import Outcome, Record, Status, from_data
from autobatch._strategies import VMAP, Strategy
from autobatch._units import format_seconds

Report = Mapping[str, Any]


class Refused(Exception):
    """The function cannot be tuned; the message says why."""


class Watch(Protocol):
    """Who is told how far a tuning is."""

    def trying(self, strategies: Sequence[Strategy], phase: str) -> None:
        """These candidates are next to be compiled, run, or timed together."""
        ...

    def learnt(self, outcome: Outcome) -> None:
        """This became of a candidate."""
        ...

    def warned(self, text: str) -> None:
        """The tuning warned of something."""
        ...


class _Death(Exception):
    """The child ended before it had an answer."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


class Supervisor:
    """Has functions tuned in a child process, which serves until a candidate ends it.

    Attributes:
        record: what is known of the tuning under way; None before anything is.
        store: the folder that its record goes to; None for none.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._child: _Child | None = None
        self._under_way: tuple[Strategy, ...] = ()
        self.record: Record | None = None
        self.store: str | None = None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def tuned(self, request: Request) -> Report:
        """Returns the child's last report on a tuning: the plan, and what it rests on.

        Raises:
            Refused: the function or its arguments are at fault, or nothing fits.
        """
        self.record = None
        while True:
            try:
                report = self._served(replace(request, known=self.record))
            except _Death as death:
                self._end()
                if self.record is None or not self._under_way:
                    message = f"`{request.target}` ended the process before it was tuned"
                    raise Refused(f"{message}: {death.reason}") from None
                self._conclude(death.status, death.reason)
            else:
                self.record = None  # it is no longer under way
                return report

    def interrupted(self) -> Record | None:
        """Ends the child and returns the record of what is known; None if nothing is."""
        self._end()
        if self.record is not None and self._under_way:
            self._conclude("out-of-time", "interrupted")
        return self.record

    def _served(self, request: Request) -> Report:
        if self._child is None:
            self._child = _Child()
        self._child.ask(request)
        self._under_way, limit_s, phase = (), None, ""
        while True:
            try:
                report = self._child.report(limit_s)
            except TimeoutError:
                status: Status = "over-compile" if phase == "compile" else "failed"
                what = "compiling " if phase == "compile" else ""
                reason = f"{what}did not end within {format_seconds(limit_s)}"
                raise _Death(status, reason) from None
            match report["event"]:
                case "began":
                    self.store = report["store"]
                case "trying":
                    names = dict.fromkeys(report["strategies"])
                    self._under_way = tuple(Strategy.parse(each) for each in names)
                    limit_s, phase = report["limit_s"], report["phase"]
                    self._watch.trying(self._under_way, phase)
                case "learnt":
                    self.record = from_data(report["record"])
                    for each in self.record.outcomes:
                        if each.strategy in self._under_way:
                            self._watch.learnt(each)
                    self._under_way, limit_s = (), None
                case "warning":
                    self._watch.warned(report["text"])
                case "refused":
                    raise Refused(report["message"])
                case _:
                    return report

    def _conclude(self, status: Status, reason: str) -> None:
        """Makes the end of the child the outcome of what it was doing.

        Of candidates that were timed together nobody knows which one it was; then `vmap`, which
        the user's program would run without autobatch, is spared.
        """
        assert self.record is not None
        if len(self._under_way) > 1:
            reason += ", while timed among others"
        blamed = [each for each in self._under_way if len(self._under_way) == 1 or each != VMAP]
        outcomes = [Outcome(strategy=each, status=status, reason=reason) for each in blamed]
        kept = (each for each in self.record.outcomes if each.strategy not in blamed)
        self.record = replace(self.record, outcomes=(*kept, *outcomes))
        for each in outcomes:
            self._watch.learnt(each)

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """One worker process, which is asked and answers over two pipes.

    It has a session of its own, so that Ctrl-C reaches the supervisor alone, and what the
    function itself started ends with it.
    """

    def __init__(self) -> None:
        asked, self._ask = os.pipe()
        self._reports, told = os.pipe()
        command = [
            sys.executable,
            "-u",
            "-P",
            "-m",
            "autobatch._cli._worker",
            str(asked),
            str(told),
        ]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the function prints is no part of the answer
                pass_fds=(asked, told),
                start_new_session=True,
            )
        finally:
            os.close(asked)
            os.close(told)
        self._text = b""

    def ask(self, request: Request) -> None:
        line = memoryview(f"{request.to_json()}\n".encode())
        with suppress(BrokenPipeError):  # it has ended; the next report says how
            while line:
                line = line[os.write(self._ask, line) :]

    def report(self, limit_s: float | None) -> Report:
        """Returns the next report.

        Raises:
            TimeoutError: there was none within the limit.
            _Death: the child has ended.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._text:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._reports], [], [], left_s)[0]:
                raise TimeoutError
            read = os.read(self._reports, 1 << 16)
            if not read:
                raise self._death()
            self._text += read
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)

    def end(self) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._ask)
        os.close(self._reports)

    def _death(self) -> _Death:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return _Death("out-of-memory", "killed, probably out of memory")
        if code < 0:
            names = {each.value: each.name for each in signal.Signals}
            return _Death("failed", f"crashed: {names.get(-code, f'signal {-code}')}")
        return _Death("failed", f"ended the process with exit code {code}")
