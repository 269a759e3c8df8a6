"""Which strategies keep `jax.vmap`'s meaning for a workload, read off its jaxpr.

A reason here is shown to the user as it stands. What has none may be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

from autobatch._devices import has_mesh, is_sharding_in_force, several_devices
from autobatch._workload import RowProgram, Workload, equations

_CALLBACKS = {"io_callback", "debug_callback", "debug_print"}
_SHARDED = {"shard_map", "sharding_constraint", "reshard"}


def why_only_vmap(workload: Workload, arrays: Sequence[Any]) -> str | None:
    """Returns why nothing but `vmap` is considered for this call, or None.

    Args:
        workload: the described call.
        arrays: its arrays, concrete or traced.
    """
    return nothing_to_choose(workload) or only_vmap(workload, arrays) or must_not_run(workload)


def nothing_to_choose(workload: Workload) -> str | None:
    """Returns why all strategies are the same for this call, or None."""
    if not all(isinstance(size, int) for each in workload.arguments for size in each.shape):
        return "its shapes are symbolic"
    if workload.row is not None and not workload.row.is_mapped:
        return "no argument is mapped"
    if workload.batch_size <= 1:
        return f"a batch of {workload.batch_size} cannot be divided"
    if workload.moving == ():
        return "it does not depend on what is differentiated"
    return None


def only_vmap(workload: Workload, arrays: Sequence[Any]) -> str | None:
    """Returns why `vmap` alone keeps the meaning, or None if every strategy does.

    Args:
        workload: the described call.
        arrays: its arrays, concrete or traced.
    """
    if jax.process_count() > 1:
        return "several processes run this program"
    row = workload.row
    if row is None:
        return "only jax.vmap itself can slice sparse arrays and mutable references"
    if is_sharding_in_force():
        return "a mesh is in force"
    if row.spmd_axis_name is not None:
        return "spmd_axis_name is given"
    if several_devices(arrays) or any(has_mesh(jax.typeof(each)) for each in arrays):
        return "an argument is sharded over several devices"
    if any(_is_ref(var.aval) for var in row.jaxpr.invars):
        return "it works on mutable references"
    if any(has_mesh(var.aval) for var in row.jaxpr.invars):
        return "it works on an array sharded over several devices"
    for equation in equations(row.jaxpr):
        reason = _only_vmap_for(equation, row.axis_name)
        if reason is not None:
            return reason
    return None


def must_not_run(workload: Workload) -> str | None:
    """Returns why the function may not be run for timing, or None.

    A function with effects must have them as often as the user calls it. A `pure_callback` may be
    called more often, as JAX says of it.
    """
    effect = None if workload.row is None else effect_of(workload.row)
    return None if effect is None else f"its effects ({effect}) must not happen for timing"


def effect_of(row: RowProgram) -> str | None:
    """Returns the name of an effect that the program has, or None.

    Only `vmap` has it as often as `vmap`: a chunk may compute a row twice.
    """
    for equation in equations(row.jaxpr):
        if equation.primitive.name in _CALLBACKS:
            return equation.primitive.name
    others = [type(each).__name__ for each in row.jaxpr.effects]
    return next((each for each in others if "NamedAxis" not in each), None)


def has_callback(row: RowProgram) -> bool:
    """Returns whether the program calls a user's code outside XLA."""
    return any(
        each.primitive.name in ("pure_callback", "ffi_call") for each in equations(row.jaxpr)
    )


def depends_on_values(row: RowProgram) -> bool:
    """Returns whether a loop or a branch depends on values, so that the run time of a row does.

    Vectorised, a loop runs until its last row is done and a branch runs for every row.
    """
    return any(
        each.primitive.name == "cond" or _is_open_loop(each) or _is_bounded_by_a_value(each)
        for each in equations(row.jaxpr)
    )


def may_not_end(row: RowProgram) -> bool:
    """Returns whether a vectorised program may run for ever where a row by itself would not.

    Under `jax.vmap` a `cond` on a mapped predicate runs both branches for all rows; a loop inside
    one of them then also runs on rows whose values were never meant to enter it.
    """
    mapped = [axis is not None for axis in row.in_axes]
    return _has_lane_loop(row.jaxpr, mapped)


def _has_lane_loop(jaxpr: Any, mapped: list[bool]) -> bool:
    varying = {var for var, is_mapped in zip(jaxpr.invars, mapped, strict=True) if is_mapped}
    for equation in jaxpr.eqns:
        inputs = [not isinstance(each, Literal) and each in varying for each in equation.invars]
        if not any(inputs):
            continue
        varying.update(equation.outvars)
        inner = [getattr(each, "jaxpr", each) for each in jaxprs_in_params(equation.params)]
        if equation.primitive.name == "cond":
            inside = (each for branch in inner for each in equations(branch))
            if inputs[0] and any(_is_open_loop(each) for each in inside):
                return True
            inputs = inputs[1:]
        # A carry may come to vary in the loop; and where operands and inputs do not pair up, every
        # input may.
        is_loop = equation.primitive.name in ("scan", "while")
        for each in inner:
            pairs_up = len(inputs) == len(each.invars) and not is_loop
            if _has_lane_loop(each, inputs if pairs_up else [True] * len(each.invars)):
                return True
    return False


def _is_open_loop(equation: Any) -> bool:
    """Returns whether an equation is a `while` that does not just count up to a bound."""
    return equation.primitive.name == "while" and not _counts_up(equation.params)


def _is_bounded_by_a_value(equation: Any) -> bool:
    """Returns whether an equation is a `while` that counts up to a bound known only at run time."""
    if equation.primitive.name != "while":
        return False
    condition = getattr(equation.params["cond_jaxpr"], "jaxpr", equation.params["cond_jaxpr"])
    bound = condition.eqns[0].invars[1]
    if isinstance(bound, Literal):
        return False
    # The condition's inputs are its constants and the carry; between them stand the body's.
    place, constants = condition.invars.index(bound), equation.params["cond_nconsts"]
    skipped = equation.params["body_nconsts"] if place >= constants else 0
    return not isinstance(equation.invars[place + skipped], Literal)


def _counts_up(parameters: dict[str, Any]) -> bool:
    """Returns whether a `while` is what `fori_loop` makes: one carry counts up to a fixed bound."""
    condition, body = (
        getattr(each, "jaxpr", each)
        for each in (parameters["cond_jaxpr"], parameters["body_jaxpr"])
    )
    if [each.primitive.name for each in condition.eqns] != ["lt"]:
        return False
    counter, bound = condition.eqns[0].invars
    before = condition.invars[parameters["cond_nconsts"] :]
    inside = body.invars[parameters["body_nconsts"] :]
    if counter not in before or not jnp.issubdtype(counter.aval.dtype, jnp.integer):
        return False
    if not isinstance(bound, Literal) and bound in before:
        place = before.index(bound)
        if body.outvars[place] is not inside[place]:
            return False
    place = before.index(counter)
    return any(
        each.primitive.name == "add"
        and each.outvars[0] is body.outvars[place]
        and each.invars[0] is inside[place]
        and isinstance(each.invars[1], Literal)
        and each.invars[1].val > 0
        for each in body.eqns
    )


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
    # Their types are private; all are called Ordered..., or ...OrderedEffect.
    if any("rdered" in type(each).__name__ for each in equation.effects):
        return "it has ordered effects"
    if axis_name is not None and any(
        _names(value, axis_name) for key, value in equation.params.items() if key != "name"
    ):
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
    return "rbg" in str(dtype)
