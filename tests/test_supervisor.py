"""What the supervisor makes of a child that dies or does not answer; the child is a script here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from records import make_outcome, make_record

from autobatch._cli import _supervisor
from autobatch._cli._request import Request
from autobatch._cli._supervisor import Refused, Supervisor
from autobatch._record import Outcome, Record, to_data
from autobatch._strategies import Strategy

REQUEST = Request(
    target="module:fun",
    in_axes=None,
    out_axes=None,
    argnums=None,
    arguments=[("float32", [8])],
    inputs=None,
    budget={"memory": "2GiB"},
    store=None,
    force=False,
    run_s=60.0,
)

Script = list[Any]
"""Reports and errors of one child after the other, each child's a list."""


class Told:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def trying(self, strategies: Sequence[Strategy], phase: str) -> None:
        self.lines.append(f"{phase} {' '.join(map(str, strategies))}")

    def learnt(self, outcome: Outcome) -> None:
        self.lines.append(f"{outcome.strategy} {outcome.status}")

    def warned(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """What children report; each list is one child's."""
    children: Script = []

    class Child:
        def __init__(self) -> None:
            self._reports: Iterator[Any] = iter(children.pop(0))

        def ask(self, request: Request) -> None:
            asked.append(request)

        def report(self, limit_s: float | None) -> Any:
            report = next(self._reports)
            if isinstance(report, Exception):
                raise report
            return report

        def end(self) -> None:
            pass

    asked.clear()
    monkeypatch.setattr(_supervisor, "_Child", Child)
    return children


asked: list[Request] = []

BEGUN = make_record(outcomes=())
MEASURED = make_record(outcomes=(make_outcome("vmap"),))
DONE = {"event": "planned", "plan": {}, "record": None, "table": ""}
CRASH = _supervisor._Death("failed", "crashed: SIGSEGV")


def learnt(record: Record) -> dict[str, Any]:
    return {"event": "learnt", "record": json.loads(json.dumps(to_data(record)))}


def trying(phase: str, *strategies: str) -> dict[str, Any]:
    return {"event": "trying", "strategies": list(strategies), "phase": phase, "limit_s": 65.0}


def known(request: Request) -> dict[str, tuple[str, str | None]]:
    assert request.known is not None
    return {str(each.strategy): (each.status, each.reason) for each in request.known.outcomes}


@pytest.mark.parametrize("phase", ["compile", "run", "time"])
def test_a_crash_is_an_outcome_and_another_child_goes_on(script: Script, phase: str) -> None:
    script += [[learnt(MEASURED), trying(phase, "map"), CRASH], [DONE]]
    told = Told()
    with Supervisor(told) as supervisor:
        assert supervisor.tuned(REQUEST) == DONE
    assert known(asked[1]) == {"vmap": ("measured", None), "map": ("failed", "crashed: SIGSEGV")}
    assert told.lines == [f"{phase} map", "map failed"]


@pytest.mark.parametrize(
    ("phase", "status", "reason"),
    [
        ("compile", "over-compile", "compiling did not end within 65.0 s"),
        ("run", "failed", "did not end within 65.0 s"),
    ],
)
def test_what_does_not_end_is_an_outcome(
    script: Script, phase: str, status: str, reason: str
) -> None:
    script += [[learnt(BEGUN), trying(phase, "vmap"), TimeoutError()], [DONE]]
    with Supervisor(Told()) as supervisor:
        supervisor.tuned(REQUEST)
    assert known(asked[1]) == {"vmap": (status, reason)}


def test_of_several_that_were_timed_vmap_is_spared(script: Script) -> None:
    script += [[learnt(MEASURED), trying("time", "vmap", "map", "vmap"), CRASH], [DONE]]
    with Supervisor(Told()) as supervisor:
        supervisor.tuned(REQUEST)
    reason = "crashed: SIGSEGV, while timed among others"
    assert known(asked[1]) == {"vmap": ("measured", None), "map": ("failed", reason)}


def test_vmap_timed_against_itself_is_blamed(script: Script) -> None:
    script += [[learnt(MEASURED), trying("time", "vmap", "vmap"), CRASH], [DONE]]
    with Supervisor(Told()) as supervisor:
        supervisor.tuned(REQUEST)
    assert known(asked[1]) == {"vmap": ("failed", "crashed: SIGSEGV")}


@pytest.mark.parametrize("reports", [[CRASH], [learnt(MEASURED), CRASH]])
def test_a_crash_outside_candidates_is_an_error(script: Script, reports: list[Any]) -> None:
    script.append(reports)
    with (
        Supervisor(Told()) as supervisor,
        pytest.raises(Refused, match="ended the process before it was tuned: crashed: SIGSEGV"),
    ):
        supervisor.tuned(REQUEST)


def test_an_interruption_leaves_what_is_known(script: Script) -> None:
    script.append([learnt(MEASURED), trying("run", "map"), KeyError()])
    with Supervisor(Told()) as supervisor:
        with pytest.raises(KeyError):
            supervisor.tuned(REQUEST)
        record = supervisor.interrupted()
    assert record is not None
    assert [(str(each.strategy), each.status) for each in record.outcomes] == [
        ("vmap", "measured"),
        ("map", "out-of-time"),
    ]


def test_after_a_tuning_nothing_is_left_to_keep(script: Script) -> None:
    script.append([learnt(MEASURED), DONE])
    with Supervisor(Told()) as supervisor:
        supervisor.tuned(REQUEST)
        assert supervisor.interrupted() is None


def test_a_child_serves_several_requests(script: Script) -> None:
    script.append([DONE, {"event": "warning", "text": "careful"}, DONE])
    told = Told()
    with Supervisor(told) as supervisor:
        supervisor.tuned(REQUEST)
        supervisor.tuned(REQUEST)
    assert (len(asked), told.lines) == (2, ["careful"])


def test_requests_survive_the_pipe() -> None:
    text = Request.to_json(REQUEST)
    assert "\n" not in text
    read = Request.from_json(text)
    assert (read.target, read.budget, read.known) == ("module:fun", {"memory": "2GiB"}, None)
    assert [tuple(each) for each in read.arguments or ()] == [("float32", [8])]
    assert read.argnums is None
    for argnums in ((), (0, 2)):  # without any it is the closed-over arrays
        text = replace(REQUEST, argnums=argnums).to_json()
        assert Request.from_json(text).argnums == list(argnums)
