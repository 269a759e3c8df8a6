"""A lease is one process's at a time, and whatever is wrong with it, nobody waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import KEY

from autobatch import _lease
from autobatch._lease import FARTHEST_S, LASTS_S, Holder, Lease, from_text, this_process, to_text
from autobatch._store import Store

NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "records")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits for a lease so far; they only move the clock."""
    waits: list[float] = []
    clock = SimpleNamespace(time=time.time, monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(_lease, "time", clock)
    return waits


def plant(store: Store, text: str | None) -> None:
    assert store.change_lease(KEY, lambda _: text, create=True)


def planted(store: Store) -> str | None:
    found: list[str | None] = []
    store.change_lease(KEY, lambda text: (found.append(text), text)[1])
    return found[0] if found else None


def elsewhere(**fields: Any) -> Holder:
    """Returns a holder on another machine whose lease has just been renewed."""
    return replace(this_process(), **{"host": "elsewhere", "boot": "another", **fields})


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    return child.pid


def test_it_is_there_while_held_and_gone_afterwards(store: Store) -> None:
    with Lease(store, KEY) as lease:
        assert lease.awaited() is None
        assert lease.is_ours
        holder = from_text(planted(store))
        assert holder is not None
        assert (holder.pid, holder.host) == (os.getpid(), os.uname().nodename)
        assert 0 < holder.expires - time.time() <= LASTS_S
    assert planted(store) is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_it_is_let_go_at_an_error(store: Store, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error), Lease(store, KEY) as lease:
        lease.awaited(60.0, fail)
    assert planted(store) is None


def test_it_is_text_of_named_fields(store: Store) -> None:
    with Lease(store, KEY) as lease:
        lease.awaited()
        assert set(json.loads(planted(store) or "")) == {
            *("host", "boot", "pid", "started", "token", "expires")
        }


def test_text_comes_back_equal() -> None:
    holder = elsewhere()
    assert from_text(to_text(holder)) == holder


def test_another_lease_of_this_process_waits(store: Store, pauses: list[float]) -> None:
    with Lease(store, KEY) as first, Lease(store, KEY) as second:
        first.awaited()
        second.awaited(5.0)
        assert (first.is_ours, second.is_ours) == (True, False)
        assert sum(pauses) == pytest.approx(5.0)
    assert planted(store) is None


def test_pauses_grow_and_stay_short(store: Store, pauses: list[float]) -> None:
    plant(store, to_text(elsewhere()))
    with Lease(store, KEY) as lease:
        lease.awaited(3.0)
    assert pauses[:5] == [0.02, 0.04, 0.08, 0.16, 0.25]
    assert max(pauses) == 0.25
    assert len(pauses) < 20


def test_it_is_taken_as_soon_as_it_is_free(store: Store, pauses: list[float]) -> None:
    plant(store, to_text(elsewhere()))

    def look() -> None:
        if len(pauses) == 3:
            plant(store, None)

    with Lease(store, KEY) as lease:
        assert lease.awaited(60.0, look) is None
        assert lease.is_ours
    assert len(pauses) == 4


def test_what_is_found_ends_the_wait(store: Store, pauses: list[float]) -> None:
    plant(store, theirs := to_text(elsewhere()))
    with Lease(store, KEY) as lease:
        assert lease.awaited(60.0, lambda: "record" if len(pauses) == 2 else None) == "record"
        assert not lease.is_ours
    assert planted(store) == theirs


def test_what_was_kept_just_before_it_was_let_go_is_found(store: Store) -> None:
    with Lease(store, KEY) as lease:
        assert lease.awaited(0.0, lambda: "record") == "record"
    assert planted(store) is None


@NEEDS_PROC
def test_a_dead_process_holds_nothing(store: Store, pauses: list[float]) -> None:
    plant(store, to_text(replace(this_process(), pid=dead_pid())))
    with Lease(store, KEY) as lease:
        lease.awaited(60.0)
        assert lease.is_ours
    assert pauses == []


@NEEDS_PROC
def test_a_process_that_nobody_has_waited_for_is_dead(store: Store, pauses: list[float]) -> None:
    code = "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        stat = Path(f"/proc/{child.pid}/stat")
        started = stat.read_text().rpartition(")")[2].split()[19]
        plant(store, to_text(replace(this_process(), pid=child.pid, started=started)))
        with Lease(store, KEY) as lease:
            lease.awaited(1.0)
            assert not lease.is_ours
        assert pauses != []
        pauses.clear()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # what is left is a zombie
        with Lease(store, KEY) as lease:
            lease.awaited(60.0)
            assert lease.is_ours
        assert pauses == []


@NEEDS_PROC
def test_a_number_that_was_given_again_is_another_process(
    store: Store, pauses: list[float]
) -> None:
    plant(store, to_text(replace(this_process(), started="1")))
    with Lease(store, KEY) as lease:
        lease.awaited(60.0)
        assert lease.is_ours
    assert pauses == []


@pytest.mark.parametrize("field", ["host", "boot"])
def test_processes_of_other_machines_are_not_judged(
    store: Store, pauses: list[float], field: str
) -> None:
    plant(store, to_text(replace(this_process(), **{field: "another"}, started="1")))
    with Lease(store, KEY) as lease:
        lease.awaited(1.0)
        assert not lease.is_ours
    assert pauses != []


@pytest.mark.parametrize("expires", [0.0, -1.0, 1e300, float("nan"), float("inf")])
def test_times_that_count_for_nothing(store: Store, pauses: list[float], expires: float) -> None:
    plant(store, to_text(elsewhere(expires=expires)))
    with Lease(store, KEY) as lease:
        lease.awaited(60.0)
        assert lease.is_ours
    assert pauses == []


def test_one_that_has_run_out_is_taken(store: Store, pauses: list[float]) -> None:
    for expires in (time.time() - 0.001, time.time() + FARTHEST_S + 5):
        plant(store, to_text(elsewhere(expires=expires)))
        with Lease(store, KEY) as lease:
            lease.awaited(60.0)
            assert lease.is_ours
    assert pauses == []


def without(field: str) -> str:
    data = asdict(elsewhere())
    del data[field]
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        *("", "no json", "[]", "{}", "3", '"text"', "null", "[" * 100_000),
        *map(without, asdict(elsewhere())),
        json.dumps({**asdict(elsewhere()), "more": 1}),
        json.dumps({**asdict(elsewhere()), "pid": "7"}),
        json.dumps({**asdict(elsewhere()), "pid": True}),
        json.dumps({**asdict(elsewhere()), "host": None}),
        json.dumps({**asdict(elsewhere()), "expires": "soon"}),
        json.dumps({**asdict(elsewhere()), "expires": 10**400}),
    ],
)
def test_damaged_lease_counts_for_nothing(store: Store, pauses: list[float], text: str) -> None:
    plant(store, text)
    with Lease(store, KEY) as lease:
        lease.awaited(60.0)
        assert lease.is_ours
    assert pauses == []
    assert planted(store) is None


def test_what_another_has_taken_since_is_left_alone(store: Store) -> None:
    with Lease(store, KEY) as lease:
        lease.awaited()
        plant(store, theirs := to_text(elsewhere()))
    assert planted(store) == theirs


def test_it_is_renewed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lease, "RENEWED_S", 0.001)
    written: list[str | None] = []
    enough = threading.Event()
    change_lease = store.change_lease

    def noting(key: str, changed: Callable[[str | None], str | None], **options: Any) -> bool:
        def change(text: str | None) -> str | None:
            written.append(changed(text))
            return written[-1]

        done = change_lease(key, change, **options)
        if len(written) == 4:
            enough.set()
        return done

    monkeypatch.setattr(store, "change_lease", noting)
    with Lease(store, KEY) as lease:
        lease.awaited()
        assert enough.wait(60)
    times = [each.expires for each in map(from_text, written) if each is not None]
    assert times == sorted(set(times))
    assert written[-1] is None
    assert planted(store) is None
    assert "autobatch-lease" not in {each.name for each in threading.enumerate()}


def test_without_a_store_there_is_nothing_to_hold() -> None:
    with Lease(None, KEY) as lease:
        assert lease.awaited(60.0) is None
        assert lease.is_ours


def test_broken_store_is_no_obstacle(store: Store, pauses: list[float]) -> None:
    store.path.mkdir(mode=0o700)
    (store.path / "cache.db").write_bytes(b"garbage" * 1000)
    with Lease(store, KEY) as lease:
        lease.awaited(60.0)
        assert lease.is_ours
    assert pauses == []
