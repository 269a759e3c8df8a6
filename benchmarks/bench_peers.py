"""Is autobatch's plan faster than peers whose chunk size K the user picks?

The peers are `jax.lax.map(batch_size=K)`, NetKet's `vmap_chunked` and optax's `micro_vmap`, under
`jax.jit`, with the K of a grid that is best over all workloads, as one sets it once for a project,
and with the best K of the grid for each workload, which only who measures them all would know. K is
clipped to the rows. optax takes divisors of the rows only: the largest that is not above K.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import (
    by_hand,
    median_and_spread,
    print_header,
    print_table,
    ratios,
    verdict,
    with_spread,
)
from _timing import Call, geometric_mean, glance, interleaved
from _workloads import SUITE, Case

from autobatch import Budget, autobatch
from autobatch._units import format_seconds

CASES = (
    "while_few_long",
    "adaptive_ode",
    "rare_decomposition",
    "switch_kinds",
    "recurrent_network",
    "histogram",
    "sorted_rows",
    "kernel_row_sums",
    "gradient_norms",
    "attention",
    "solve_positive",
    "elementwise_chain",
)
"""A spread of kinds, among those that every peer accepts: mapped along axis 0, rows not prime."""
GRID = (4, 16, 64, 256, 1024, 4096)
EXPECTED_CALLS = 100_000
BAR_COMMON, BAR_BEST = 0.85, 1.03

FINALISTS = 2
"""The best size is the best of so many that were fastest at a glance, and of the common one."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another way to map in chunks; `mapped` takes a function, its axes as a tuple and a size."""

    name: str
    mapped: Callable[[Callable[..., Any], Any, int], Callable[..., Any]]
    needs_divisor: bool = False

    def size(self, rows: int, chunk: int) -> int:
        """Returns the size that it accepts for `chunk`."""
        size = min(rows, chunk)
        while self.needs_divisor and rows % size:
            size -= 1
        return size


@dataclass(frozen=True, kw_only=True)
class Form:
    """One compiled form of a workload, and what a glance saw of its run time."""

    size: int
    call: Call
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One workload: autobatch's form, and each peer's for every K of the grid."""

    name: str
    plan: str
    ours: Call
    peers: dict[str, dict[int, Form]]

    def best(self, peer: Peer) -> list[Form]:
        """Returns the fastest of the peer's forms at a glance, the fastest first."""
        forms = {each.size: each for each in self.peers[peer.name].values()}
        return sorted(forms.values(), key=lambda each: each.seconds)[:FINALISTS]


def assert_agree(found: Any, expected: Any) -> None:
    """Raises where results differ by more than strategies may, which add in another order."""

    def check(found: Any, expected: Any) -> None:
        largest = float(np.max(np.abs(expected), initial=0.0))
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3 * largest)

    jax.tree.map(check, found, expected)


def installed_peers() -> list[Peer]:
    """Returns the peers that can be imported, and says which cannot."""
    peers = [Peer(name="lax.map", mapped=lambda fun, axes, size: by_hand(fun, axes, _named(size)))]
    for name, load in (("NetKet", _netket), ("optax", _optax)):
        try:
            peers.append(load())
        except ImportError as error:
            print(f"{name}: not installed ({error})", flush=True)
    return peers


def _named(size: int) -> str:
    return f"chunked:{size}"


def _netket() -> Peer:
    # It would otherwise set 64 bits and a mesh for the whole process.
    os.environ |= {"NETKET_ENABLE_X64": "0", "NETKET_SHARDING": "0"}
    from netket.jax import vmap_chunked

    return Peer(
        name="NetKet",
        mapped=lambda fun, axes, size: jax.jit(vmap_chunked(fun, axes, chunk_size=size)),
    )


def _optax() -> Peer:
    from optax.microbatching import micro_vmap

    return Peer(
        name="optax",
        mapped=lambda fun, axes, size: jax.jit(micro_vmap(fun, axes, microbatch_size=size)),
        needs_divisor=True,
    )


def prepared(case: Case, peers: Sequence[Peer], folder: str) -> Contest:
    """Returns a workload, tuned by autobatch and glanced at in every form of the peers."""
    fun, in_axes, args = case.make()
    args = jax.tree.map(jnp.asarray, args)
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    mapped = next(arg for arg, axis in zip(args, axes, strict=True) if axis is not None)
    rows = len(jax.tree.leaves(mapped)[0])
    ours = autobatch(
        fun, in_axes, store=folder, budget=Budget(expected_calls=EXPECTED_CALLS), name=case.name
    )
    plan = str(ours.tune(*args).strategy)
    expected = ours(*args)
    forms: dict[str, dict[int, Form]] = {}
    for peer in peers:
        by_size: dict[int, Form] = {}
        for size in sorted({peer.size(rows, chunk) for chunk in GRID}):
            call = partial(peer.mapped(fun, axes, size), *args)
            assert_agree(call(), expected)
            by_size[size] = Form(size=size, call=call, seconds=glance(call))
        forms[peer.name] = {chunk: by_size[peer.size(rows, chunk)] for chunk in GRID}
    return Contest(name=case.name, plan=plan, ours=partial(ours, *args), peers=forms)


def common_size(peer: Peer, contests: Sequence[Contest]) -> int:
    """Returns the K of the grid with the least geometric mean of run times."""
    return min(
        GRID,
        key=lambda chunk: geometric_mean(each.peers[peer.name][chunk].seconds for each in contests),
    )


def against_peers(
    contest: Contest, peers: Sequence[Peer], common: dict[str, int]
) -> tuple[list[str], list[tuple[float, float]]]:
    """Returns a row of the table, and the ratios to every peer at the common and at the best K."""
    forms = [[contest.peers[peer.name][common[peer.name]], *contest.best(peer)] for peer in peers]
    ours, *theirs = interleaved([contest.ours, *(form.call for each in forms for form in each)])
    samples = iter(theirs)
    row, found = [contest.name, contest.plan, format_seconds(median_and_spread(ours)[0])], []
    for fixed, *finalists in forms:
        at_common = ratios(ours, next(samples))
        # The common size is one of the grid, so it may be the best.
        at_sizes = [(fixed.size, at_common)]
        at_sizes += [(form.size, ratios(ours, next(samples))) for form in finalists]
        size, at_best = max(at_sizes, key=lambda each: median_and_spread(each[1])[0])
        row += [with_spread(at_common), with_spread(at_best), str(size)]
        found.append((median_and_spread(at_common)[0], median_and_spread(at_best)[0]))
    return row, found


def main() -> None:
    print_header(
        "autobatch's run time over that of peers, at one K for all and at the best K for each"
    )
    peers = installed_peers()
    cases = {each.name: each for each in SUITE}
    with tempfile.TemporaryDirectory() as folder:
        contests = [prepared(cases[name], peers, folder) for name in CASES]
    common = {peer.name: common_size(peer, contests) for peer in peers}
    measured = [against_peers(contest, peers, common) for contest in contests]
    columns, table = ["workload", "plan", "run"], [row for row, _ in measured]
    means, bars = ["geometric mean", "", ""], ["bar", "", ""]
    # No size of the grid is row by row, so where that wins, all peers lose.
    others = ["the same, plan not map", "", ""]
    is_other = [contest.plan != "map" for contest in contests]
    for peer, over in zip(peers, zip(*(found for _, found in measured), strict=True), strict=True):
        columns += [f"{peer.name} K={common[peer.name]}", "best K", "K"]
        for values, bar in zip(zip(*over, strict=True), (BAR_COMMON, BAR_BEST), strict=True):
            mean = geometric_mean(values)
            means.append(f"{mean:.2f}")
            bars.append(verdict(mean, bar))
            others.append(f"{geometric_mean(compress(values, is_other)):.2f}")
        for row in (means, bars, others):
            row.append("")
    print_table(columns, [*table, means, bars, others])


if __name__ == "__main__":
    main()
