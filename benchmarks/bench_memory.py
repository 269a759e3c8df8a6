"""Is `peak_bytes` what a call takes, and does a process keep to `Budget(memory=...)`?

On a CPU, where all that a call takes is the growth of the process: of its resident memory's
high-water mark in the first two tables, of its address space in the third, which a limit ends.
Arguments are made before a reading. Every figure is from a process of its own.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from _common import (
    by_hand,
    in_new_process,
    median_and_spread,
    print_header,
    print_table,
    ratios,
    verdict,
    with_spread,
)
from _memory_programs import BUDGETS_MIB, LARGE, MAKE, Made

from autobatch import Budget, autobatch
from autobatch._bound import tree_bytes
from autobatch._memory import code_bytes, planned_bytes, process_growth

MIB = 1024**2
REPETITIONS = 5
LEAST_MIB = 32
"""What loading code adds to a first call must not decide a ratio."""
PEAK_LEAST, PEAK_MOST = 0.85, 1.2
"""How far `peak_bytes` may be from the growth: the least of any process, the most of the median."""
SHARE, COMPILER_MIB = 1.1, 48
"""A process may grow to this share of its budget, and by this much for tracing and compiling."""
ROOM_MIB = 600
"""Address space beyond the budget, for the compiler, the stacks of threads and their arenas."""
HANGS_S = 90

# What a child does.


def _warm(name: str) -> Made:
    """Returns a function and its arguments, in a process that has compiled something before."""
    fun, in_axes, args = MAKE[name]()
    args = jax.block_until_ready(jax.device_put(args))
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(8)))
    return fun, in_axes, args


def winner(name: str, store: str) -> dict[str, Any]:
    """Child: tunes, and returns what wins and the memory that it is said to need."""
    fun, in_axes, args = _warm(name)
    function = autobatch(fun, in_axes, store=store)
    jax.block_until_ready(function(*args))
    plan = function.plan(*args)
    outcome = next(each for each in plan.outcomes if each.strategy == plan.strategy)
    assert outcome.peak_bytes is not None
    return {
        "strategy": str(plan.strategy),
        "source": outcome.peak_source,
        "peak": (outcome.peak_bytes - tree_bytes(jax.tree.leaves(args))) / MIB,
    }


def one_call(name: str, strategy: str) -> dict[str, float | None]:
    """Child: returns what XLA planned for a compiled program, and the growth over its one call."""
    fun, in_axes, args = _warm(name)
    compiled = autobatch(fun, in_axes, strategy=strategy, store=False).lower(*args).compile()
    _, growth = _grown(lambda: compiled(*args))
    return {"planned": (planned_bytes(compiled) or 0) / MIB, "growth": growth}


def tuned(name: str, memory_mib: str) -> dict[str, Any]:
    """Child: returns the growth over tuning and a call, and what came of them."""
    fun, in_axes, args = _warm(name)
    function = autobatch(fun, in_axes, store=False, budget=_budget(memory_mib))
    with _HighWater() as water:
        result = jax.block_until_ready(function(*args))
    plan = function.plan(*args)
    return {
        "growth": water.growth / MIB,
        "strategy": str(plan.strategy),
        "right": _is_right(fun, in_axes, args, result),
        "statuses": [(str(each.strategy), each.status) for each in plan.outcomes],
    }


def limited(name: str, room_mib: str, how: str) -> dict[str, Any]:
    """Child: returns what came of a call in little address space.

    Args:
        name: which program.
        room_mib: address space beyond what the process has when it begins.
        how: "vmap", or the memory of the budget; "default" for none.
    """
    fun, in_axes, args = _warm(name)
    if how == "vmap":
        function: Any = jax.jit(jax.vmap(fun, in_axes))
    else:
        function = autobatch(fun, in_axes, store=False, budget=_budget(how))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + int(room_mib) * MIB, hard))
    try:
        result = jax.block_until_ready(function(*args))
    except Exception as error:
        return {"came": f"raises {type(error).__name__}", "message": str(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    came = "runs" if how == "vmap" else str(function.plan(*args).strategy)
    return {"came": came, "right": _is_right(fun, in_axes, args, result)}


def _budget(memory_mib: str) -> Budget:
    return Budget() if memory_mib == "default" else Budget(memory=f"{memory_mib}MiB")


def _grown(run: Callable[[], Any]) -> tuple[Any, float]:
    """Returns what `run` returned, and by how many mebibytes it grew the process, code included."""
    code = code_bytes()
    result, growth = process_growth(lambda: jax.block_until_ready(run()))
    assert growth is not None, "this system does not let the high-water mark be reset"
    return result, (growth + code_bytes() - code) / MIB


class _HighWater:
    """How far this process grows: its high-water mark is read again and again.

    Once would not do, since autobatch resets the mark whenever it measures a run.
    """

    def __init__(self) -> None:
        self._process, self._end = psutil.Process(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._before = self._process.memory_info().rss
        self._most = self._before

    def __enter__(self) -> _HighWater:
        Path("/proc/self/clear_refs").write_text("5")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._read()

    @property
    def growth(self) -> int:
        """Bytes."""
        return self._most - self._before

    def _watch(self) -> None:
        while not self._end.wait(1e-3):
            self._read()

    def _read(self) -> None:
        status = Path("/proc/self/status").read_text()
        kibibytes = status.partition("VmHWM:")[2].split(maxsplit=1)[0]
        self._most = max(self._most, int(kibibytes) * 1024)


def _is_right(fun: Any, in_axes: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Returns whether the first, a middle and the last row are what `jax.lax.map` makes of them."""
    mapped = [arg for arg, axis in zip(args, in_axes, strict=True) if axis is not None]
    rows = len(jax.tree.leaves(mapped)[0])
    places = [0, rows // 2, rows - 1]

    def few(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[places], tree)

    arguments = [arg if axis is None else few(arg) for arg, axis in zip(args, in_axes, strict=True)]
    expected = by_hand(fun, in_axes, "map")(*arguments)
    return all(
        np.allclose(found, right, rtol=2e-3, atol=2e-3 * np.abs(right).max())
        for found, right in zip(
            jax.tree.leaves(few(result)), jax.tree.leaves(expected), strict=True
        )
    )


CHILDREN: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (winner, one_call, tuned, limited)
}


# What the parent asks them.


def print_peaks() -> None:
    """Prints the peaks that are stated of winners beside what one call of them takes."""
    print("peak_bytes of the winner over the growth of a process that runs it once, in MiB")
    print("beyond the arguments")
    with tempfile.TemporaryDirectory() as store:
        winners = {
            each.__name__: in_new_process(__file__, "winner", each.__name__, store)
            for each in LARGE
        }
    calls: dict[str, list[Any]] = {name: [] for name in winners}
    for _ in range(REPETITIONS):
        for name, found in winners.items():
            calls[name].append(in_new_process(__file__, "one_call", name, found["strategy"]))

    rows = []
    for name, found in winners.items():
        growth = [each["growth"] for each in calls[name]]
        over = ratios([found["peak"]] * REPETITIONS, growth)
        is_within = round(min(over), 2) >= PEAK_LEAST
        is_within &= round(median_and_spread(over)[0], 2) <= PEAK_MOST
        bar = f"{PEAK_LEAST:.2f} to {PEAK_MOST:.2f}" + ("" if is_within else " missed")
        rows.append(
            [
                name,
                found["strategy"],
                f"{found['peak']:.1f}",
                found["source"],
                f"{calls[name][0]['planned']:.1f}",
                with_spread(growth, 1),
                with_spread(over),
                f"{min(over):.2f}",
                bar if found["peak"] >= LEAST_MIB else f"below {LEAST_MIB} MiB",
            ]
        )
    columns = ["function", "winner", "peak", "source", "XLA's plan", "growth", "peak/growth"]
    print_table([*columns, "least", "bar"], rows)


def print_growth() -> None:
    """Prints how far processes grow that tune and call under a budget."""
    print(f"\nGrowth of a process that tunes and calls under Budget(memory=M), in MiB; {SHARE} M")
    print(f"and {COMPILER_MIB} MiB for the compiler are allowed. In multiples of M, vmap compiled")
    print("before: what XLA plans, and what a call takes")
    rows = []
    for function, memory in BUDGETS_MIB.items():
        name = function.__name__
        by_vmap = in_new_process(__file__, "one_call", name, "vmap")
        found = in_new_process(__file__, "tuned", name, str(memory))
        by_status: dict[str, list[str]] = {}
        for strategy, status in found["statuses"]:
            by_status.setdefault(status, []).append(strategy)
        by_status.pop("unmeasured", None)
        rows.append(
            [
                name,
                str(memory),
                f"{by_vmap['planned'] / memory:.1f} M",
                f"{by_vmap['growth'] / memory:.1f} M",
                found["strategy"],
                "yes" if found["right"] else "no: missed",
                f"{found['growth']:.1f}",
                verdict(found["growth"], SHARE * memory + COMPILER_MIB),
                "; ".join(f"{status}: {', '.join(them)}" for status, them in by_status.items()),
            ]
        )
    columns = ["function", "M", "vmap: plan", "growth", "strategy", "right", "growth", "bar"]
    print_table([*columns, "outcomes"], rows)


def print_limited() -> None:
    """Prints what comes of calls in processes whose address space has a limit."""
    print(f"\nA call with M + {ROOM_MIB} MiB of address space left: what comes of it")
    rows = []
    for function, memory in BUDGETS_MIB.items():
        name, room = function.__name__, memory + ROOM_MIB
        by_vmap = _survived(name, room, "vmap")
        ours = [_survived(name, room, how) for how in (str(memory), "default")]
        is_kept = all(each.get("right") for each in ours)
        bar = "right, vmap is not" + ("" if is_kept else " missed")
        rows.append(
            [
                name,
                str(memory),
                str(room),
                *(_came(each) for each in (by_vmap, *ours)),
                "vmap fits" if by_vmap.get("right") else bar,
            ]
        )
    print_table(["function", "M", "room", "vmap", "Budget(M)", "Budget()", "bar"], rows)


def _survived(name: str, room_mib: int, how: str) -> dict[str, Any]:
    """Returns what a child that is under a limit found, or how it ended."""
    command = [sys.executable, __file__, "limited", name, str(room_mib), how]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS_S)
    except subprocess.TimeoutExpired:
        return {"came": "hangs"}
    if done.returncode < 0:
        return {"came": f"killed by {signal.Signals(-done.returncode).name}"}
    if done.returncode:
        raise RuntimeError(f"a child failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _came(found: dict[str, Any]) -> str:
    if "right" not in found:
        return found["came"]
    return f"{found['came']}, {'right' if found['right'] else 'wrong'}"


def main() -> None:
    print_header("Memory: what is stated of a call, and what a process takes under a budget")
    print_peaks()
    print_growth()
    print_limited()


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(CHILDREN[sys.argv[1]](*sys.argv[2:])))
    else:
        main()
