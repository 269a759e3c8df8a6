"""One jit object: what a call of it traces, and where it gets its strategy from.

jit's own cache is the dispatch table. Its miss runs the body below, once per signature; the body
describes the call, is told the strategy, and maps. Which program serves which call is in `_api`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from autobatch._mapping import mapped
from autobatch._strategies import Strategy
from autobatch._workload import MapSpec, Workload, describe


class Unplanned(Exception):
    """Raised out of a trace: this workload has no plan yet and must be tuned outside."""

    def __init__(self, workload: Workload) -> None:
        super().__init__("no plan for this call")
        self.workload = workload


class Program:
    """A jit object that serves every signature for which `resolve` knows a strategy.

    Attributes:
        jitted: the jit object. What is compiled on it lives as long as it does.
    """

    def __init__(self, spec: MapSpec, resolve: Callable[[Workload, list[Any]], Strategy]) -> None:
        """Makes the jit object; nothing is traced yet.

        Args:
            spec: the function and its axes.
            resolve: returns the strategy for a workload and its traced leaves, or raises
                `Unplanned`.
        """
        self._prepared: tuple[Workload, Strategy] | None = None

        @functools.wraps(spec.fun, updated=())
        def body(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree.flatten((args, kwargs))
            if self._prepared is not None and self._prepared[0].serves(leaves, tree):
                workload, strategy = self._prepared
            else:
                workload = describe(spec, args, kwargs)
                strategy = resolve(workload, leaves)
            return mapped(strategy, workload, leaves)

        self.jitted = jax.jit(body)

    def prepare(self, workload: Workload, strategy: Strategy) -> None:
        """Lets the next trace of this workload use what is known already, without tracing `fun`."""
        self._prepared = (workload, strategy)

    def release(self) -> None:
        """Forgets what was prepared: a jaxpr holds constants, and is not kept per shape."""
        self._prepared = None
