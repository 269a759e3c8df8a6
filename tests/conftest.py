"""What every test starts from: one CPU backend, strict promotion, a store of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Before jax is imported, and in the environment, so that child processes have it too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # what it serves is not compiled

import jax.monitoring
import pytest
from hypothesis import HealthCheck, settings

from autobatch._gate import Need
from autobatch._record import Outcome
from autobatch._search import UNROLLED_ROWS_MOST, Search, chunk_sizes
from autobatch._strategies import MAP, UNROLLED, VMAP, Strategy, chunked, rematerialised

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"

# The same examples each time; no limit on their time, since they may compile on a busy machine.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def store_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own store, and no setting of the user's."""
    for name in [each for each in os.environ if each.startswith("AUTOBATCH_")]:
        monkeypatch.delenv(name)
    # The default folder too, for tests that take AUTOBATCH_CACHE_DIR away.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "store"
    monkeypatch.setenv("AUTOBATCH_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def count_compiles() -> Iterator[Callable[[], int]]:
    """Returns how many programs XLA compiled in this process since the test began.

    Every operation on a `jax.Array` outside `jit` compiles too, the first time: make inputs with
    numpy, or read the counter after they are made and compare.
    """
    durations: list[float] = []

    def listen(event: str, duration_s: float, **_: str | int) -> None:
        if event == BACKEND_COMPILE:
            durations.append(duration_s)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(durations)
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def exhaustive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets searches try all families, whether or not they are worth it: tests run tiny programs."""

    def next_(
        self: Search, outcomes: Sequence[Outcome], needs: Sequence[Need] = ()
    ) -> Strategy | None:
        tried = {each.strategy for each in outcomes}
        sizes = [chunked(each) for each in chunk_sizes(self.batch_size)[:2]]
        unrolled = [UNROLLED] if self.batch_size <= UNROLLED_ROWS_MOST else []
        loops = [*sizes, MAP, *unrolled]
        if self.remat:
            loops = [*map(rematerialised, [*sizes, MAP])]
        for each in (VMAP, *loops):
            is_open = each.family in self.families and each not in tried
            if is_open and self._bar(each, outcomes, needs) is None:
                return each
        return None

    monkeypatch.setattr(Search, "next", next_)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process remembers of records and warnings is nobody else's."""
    monkeypatch.setattr("autobatch._recall._KNOWN", {})
    monkeypatch.setattr("autobatch._errors._WARNED", set())
