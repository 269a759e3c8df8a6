"""What the worker of `autobatch tune` reports, and how it goes on from what was known."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autobatch._cli import _worker
from autobatch._cli._request import Request
from autobatch._record import Outcome, from_data
from autobatch._search import Search
from autobatch._strategies import VMAP

REQUEST = Request(
    target="served:fun",
    in_axes=None,
    out_axes=None,
    argnums=None,
    arguments=[("float32", [8, 4])],
    inputs=None,
    budget={"compile_s": 50.0, "tuning_s": 40.0},
    store=None,
    force=False,
    run_s=30.0,
)

GRADIENT = replace(REQUEST, argnums=(0,))

Reports = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of the user's, which can be imported."""
    (tmp_path / "served.py").write_text("import jax.numpy as jnp\n\nfun = jnp.sum\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("served", None)


def served(request: Request = REQUEST) -> Reports:
    """Returns what the worker reports on a request."""
    reports: Reports = []
    _worker._serve(request, lambda event, **what: reports.append({"event": event, **what}))
    return reports


def doings(reports: Reports) -> list[str]:
    """Returns what was tried, in order; a wait or a further run is left out."""
    found = [
        f"{each['phase']} {' '.join(dict.fromkeys(each['strategies']))}"
        for each in reports
        if each["event"] == "trying" and each["phase"] != "wait"
    ]
    return list(dict.fromkeys(found))


@pytest.mark.usefixtures("exhaustive")
def test_every_candidate_is_announced_before_it_compiles_and_runs(store_folder: Path) -> None:
    reports = served()
    assert reports[0] == {"event": "began", "store": str(store_folder)}
    assert reports[1]["event"] == "learnt"
    assert from_data(plain(reports[1]["record"])).searched.tuning_s < 1
    assert reports[-1]["event"] == "planned"
    families = ["vmap", "chunked:4", "chunked:2", "map", "unrolled"]
    tried = [each for each in doings(reports) if not each.startswith("time")]
    assert tried == [f"{what} {each}" for each in families for what in ("compile", "run")]
    limits = {each["phase"]: each["limit_s"] for each in reports if each["event"] == "trying"}
    grace = _worker.GRACE_S
    assert limits == {"compile": 50.0 + grace, "wait": None, "run": 30.0, "time": 70.0}


@pytest.mark.usefixtures("exhaustive")
def test_what_is_learnt_grows_by_one_candidate_at_a_time() -> None:
    records = [each["record"] for each in served() if each["event"] == "learnt"]
    measured = [
        sum(outcome["status"] == "measured" for outcome in record["outcomes"]) for record in records
    ]
    assert measured == [0, 1, 2, 3, 4, 5]


@pytest.mark.usefixtures("exhaustive")
def test_what_is_known_to_crash_is_not_tried_again() -> None:
    record = from_data(plain(served()[1]["record"]))
    crash = Outcome(strategy=VMAP, status="failed", reason="crashed: SIGSEGV")
    known = replace(record, outcomes=(crash,), tuned_in_s=1.0)
    reports = served(replace(REQUEST, known=known, force=True))
    assert not [each for each in doings(reports) if "vmap" in each]
    found = {each["strategy"]: each["reason"] for each in reports[-1]["plan"]["outcomes"]}
    assert found["vmap"] == "crashed: SIGSEGV"
    assert reports[-1]["record"]["tuned_in_s"] > 1.0


@pytest.mark.usefixtures("exhaustive")
def test_time_that_is_used_up_is_used_up_for_the_next_child_too() -> None:
    record = from_data(plain(served()[-1]["record"]))
    known = replace(record, tuned_in_s=41.0)
    reports = served(replace(REQUEST, known=known, force=True))
    assert doings(reports) == []
    found = {each["strategy"]: each["run_s"] for each in reports[-1]["record"]["outcomes"]}
    assert found == {str(each.strategy): each.run_s for each in record.outcomes}


@pytest.mark.usefixtures("exhaustive")
def test_of_a_derivative_the_same_is_announced() -> None:
    reports = served(GRADIENT)
    tried = [each for each in doings(reports) if not each.startswith("time")]
    strategies = ["vmap", "chunked:4+remat", "chunked:2+remat", "map+remat"]
    assert tried == [f"{what} {each}" for each in strategies for what in ("compile", "run")]
    assert (reports[-1]["plan"]["name"], reports[-1]["record"]["name"]) == ("grad of sum",) * 2


@pytest.mark.parametrize("asked", [REQUEST, GRADIENT], ids=["call", "derivative"])
def test_a_record_is_found_without_measuring(
    monkeypatch: pytest.MonkeyPatch, asked: Request
) -> None:
    first = served(asked)[-1]
    monkeypatch.setattr(Search, "next", lambda *_: pytest.fail("it searches"))
    reports = served(asked)
    assert doings(reports) == []
    assert (reports[-1]["plan"]["key"], reports[-1]["record"]) == (
        first["plan"]["key"],
        first["record"],
    )


def plain(data: Any) -> Any:
    """Returns data as JSON has them, without tuples."""
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    return [plain(each) for each in data] if isinstance(data, list | tuple) else data
