"""Which strategies keep `jax.vmap`'s meaning for a workload, read off its jaxpr.

A reason here is shown to the user as it stands. What has none may be tried.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from autobatch._devices import several_devices
from autobatch._workload import Workload, equations

_CALLBACKS = {"io_callback", "debug_callback", "debug_print"}
_SHARDED = {"shard_map", "sharding_constraint", "reshard"}
_RBG = ("rbg", "unsafe_rbg")


def nothing_to_choose(workload: Workload) -> str | None:
    """Returns why all strategies are the same for this call, or None."""
    if not workload.is_mapped:
        return "no argument is mapped"
    if workload.batch_size <= 1:
        return f"a batch of {workload.batch_size} cannot be divided"
    return None


def only_vmap(workload: Workload, leaves: list[Any]) -> str | None:
    """Returns why `vmap` alone keeps the meaning, or None if every strategy does.

    Args:
        workload: the described call.
        leaves: its arguments, concrete or traced.
    """
    if jax.process_count() > 1:
        return "several processes run this program"
    if workload.spmd_axis_name is not None:
        return "spmd_axis_name is given"
    if several_devices(leaves) or any(_has_mesh(jax.typeof(leaf)) for leaf in leaves):
        return "an argument is sharded over several devices"
    jaxpr = workload.jaxpr.jaxpr
    if any(_is_ref(var.aval) for var in [*jaxpr.constvars, *jaxpr.invars]):
        return "it works on mutable references"
    if any(_has_mesh(var.aval) for var in [*jaxpr.constvars, *jaxpr.invars]):
        return "it works on an array sharded over several devices"
    for equation in equations(workload.jaxpr):
        reason = _only_vmap_for(equation, workload.axis_name)
        if reason is not None:
            return reason
    return None


def must_not_run(workload: Workload) -> str | None:
    """Returns why the function may not be run for timing, or None.

    A function with effects must have them as often as the user calls it. A `pure_callback` may be
    called more often, as JAX says of it.
    """
    for equation in equations(workload.jaxpr):
        if equation.primitive.name in _CALLBACKS:
            return f"its effects ({equation.primitive.name}) must not happen for timing"
    if any("NamedAxis" not in type(each).__name__ for each in workload.jaxpr.effects):
        return "its effects must not happen for timing"
    return None


def _only_vmap_for(equation: Any, axis_name: Any) -> str | None:
    name = equation.primitive.name
    if name in _SHARDED:
        return f"it contains `{name}`"
    if "custom_vmap" in name:
        return "it has a custom_vmap rule"
    if name == "rng_bit_generator" or any(
        _is_rbg(atom.aval) for atom in [*equation.invars, *equation.outvars]
    ):
        return "rbg keys draw other numbers row by row than under vmap"
    if any(_is_ref(atom.aval) for atom in equation.invars if not isinstance(atom, Literal)):
        return "it works on mutable references"
    if any("rdered" in type(each).__name__ for each in equation.effects):
        return "it has ordered effects"
    if axis_name is not None and any(_names(each, axis_name) for each in equation.params.values()):
        return f"`{name}` uses the axis {axis_name!r}"
    return None


def _names(value: Any, axis_name: Any) -> bool:
    if isinstance(value, tuple | list | frozenset | set):
        return any(_names(each, axis_name) for each in value)
    return isinstance(value, type(axis_name)) and value == axis_name


def _is_ref(aval: Any) -> bool:
    return hasattr(aval, "inner_aval")


def _is_rbg(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    return any(each in str(dtype) for each in _RBG)


def _has_mesh(aval: Any) -> bool:
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty
