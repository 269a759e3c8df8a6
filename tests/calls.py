"""Calls of functions, described and mapped without planning: what the tests of the heart share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from autobatch._leaves import split, split_traced
from autobatch._mapping import mapped
from autobatch._strategies import Strategy
from autobatch._workload import MapSpec, Workload, describe

Function = Callable[..., Any]


def described(fun: Function, *args: Any, **options: Any) -> Workload:
    """Returns the workload of a call; `kwargs` among the options are the call's."""
    arrays, statics = split(args, options.pop("kwargs", {}))
    return describe(MapSpec(fun=fun, **options), arrays, statics)


def program(strategy: str, fun: Function, **options: Any) -> Any:
    """Returns a jit object that maps `fun` in this way; "jax.vmap" is JAX's own."""
    if strategy == "jax.vmap":
        return jax.jit(jax.vmap(fun, **options))
    parsed, spec = Strategy.parse(strategy), MapSpec(fun=fun, **options)

    def body(*args: Any, **kwargs: Any) -> Any:
        arrays, statics = split_traced(args, kwargs)
        workload = describe(spec, arrays, statics)
        assert workload.row is not None
        outputs = mapped(parsed, workload.row, [*workload.consts, *arrays])
        return jax.tree.unflatten(workload.out_tree, outputs)

    return jax.jit(body)
