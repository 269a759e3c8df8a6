"""The strategies as JAX programs over one traced jaxpr, to be called under `jax.jit`.

Every strategy maps the same jaxpr of one example. Which one is used is decided elsewhere.

* `vmap` is `jax.vmap`, `unrolled` a Python loop.
* `map` and `chunked:K` are `jax.lax.map`, the latter with `batch_size=K`, in another form: all
  steps have the same size, the last one overlaps the one before it instead of leaving a remainder
  that has to be traced and compiled again, rows are read from where they lie and results are
  written to where they stay. So the inputs are not copied, and neither are the outputs.
* Equations that depend on no mapped input are evaluated once, before the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import DropVar, Literal
from jax.extend.core.primitives import convert_element_type_p

from autobatch._strategies import VMAP, Strategy, balanced_chunk
from autobatch._workload import RowProgram

# Evaluated again in every step, these cost next to nothing and fuse into what uses them; kept
# from outside the loop, they would be read from memory instead.
_CHEAP = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "empty",
    "expand_dims",
    "iota",
    "reshape",
    "squeeze",
    "stop_gradient",
}


def mapped(strategy: Strategy, row: RowProgram, operands: Sequence[Any]) -> list[Any]:
    """Returns the outputs of the mapped function, as `jax.vmap` would return them.

    Args:
        strategy: how to map.
        row: the function of one example, and the axes.
        operands: the closed-over arrays, then those of the call, batch axes included.

    Raises:
        ValueError, TypeError: what `jax.vmap` raises for a batched output without an axis.
    """
    size = row.batch_size
    if size and row.is_mapped:
        match strategy.family:
            case "unrolled":
                return _unrolled(row, operands)
            case "map":
                return _looped(row, operands, None)
            case "chunked" if strategy.chunk_size is not None and strategy.chunk_size < size:
                return _looped(row, operands, balanced_chunk(size, strategy.chunk_size))
            case _:
                pass
    return jax.vmap(
        lambda *each: jax.core.eval_jaxpr(row.jaxpr, (), *each),
        in_axes=row.in_axes,
        out_axes=list(row.out_axes),
        axis_name=row.axis_name,
        axis_size=size,
        spmd_axis_name=row.spmd_axis_name,
    )(*operands)


def check(row: RowProgram, operands: Sequence[Any]) -> None:
    """Raises what `jax.vmap` raises for this program; computes nothing.

    Other strategies would accept what vmap refuses.
    """
    jax.eval_shape(lambda *each: mapped(VMAP, row, each), *operands)


def _unrolled(row: RowProgram, operands: Sequence[Any]) -> list[Any]:
    split = _split(row, operands)
    rows = [
        split.rest(*(_row(leaf, axis, index) for leaf, axis in split.inputs))
        for index in range(row.batch_size)
    ]
    outputs = [
        column[-1]
        if axis is None
        else jax.lax.concatenate([jnp.expand_dims(each, axis) for each in column], axis)
        for column, axis in zip(zip(*rows, strict=True), split.out_axes, strict=True)
    ]
    return split.complete(outputs)


def _looped(row: RowProgram, operands: Sequence[Any], chunk: int | None) -> list[Any]:
    """Returns the outputs of a loop over rows, or over chunks of `chunk` rows."""
    split, batch_size = _split(row, operands), row.batch_size
    size = chunk or 1
    steps = -(-batch_size // size)

    def step(index: Any, buffers: list[Any]) -> list[Any]:
        start = index * size
        if batch_size % size:
            start = jnp.minimum(start, batch_size - size)
        if chunk is None:
            results = split.rest(*(_row(leaf, axis, start) for leaf, axis in split.inputs))
        else:
            results = jax.vmap(
                split.rest,
                in_axes=[axis for _, axis in split.inputs],
                out_axes=list(split.out_axes),
                axis_size=size,
            )(*(_rows(leaf, axis, start, size) for leaf, axis in split.inputs))
        return [
            _written(buffer, _varying(jnp.asarray(result), manual), axis, start, chunk is None)
            for buffer, result, axis in zip(buffers, results, split.out_axes, strict=True)
        ]

    # Inside `shard_map` a loop's state must vary over the mesh from the beginning if it does later.
    manual = frozenset().union(*(varying_axes(value) for value, _ in split.inputs))
    buffers = [
        _varying(_buffer(aval, axis, batch_size), manual)
        for aval, axis in zip(split.out_avals, split.out_axes, strict=True)
    ]
    buffers = jax.lax.fori_loop(0, steps, step, buffers)
    return split.complete(
        [_weak_as(buffer, aval) for buffer, aval in zip(buffers, split.out_avals, strict=True)]
    )


@dataclass(frozen=True, kw_only=True)
class _Split:
    """A program cut in two: what was evaluated once, and what is left for every row.

    Attributes:
        rest: what is left of the function; takes `inputs`' rows, returns the mapped outputs.
        inputs: operands and shared values that `rest` needs, with their axes.
        out_avals, out_axes: of the outputs of `rest`.
        complete: adds the outputs that are the same for every row.
    """

    rest: Callable[..., list[Any]]
    inputs: list[tuple[Any, int | None]]
    out_avals: list[Any]
    out_axes: list[int | None]
    complete: Callable[[list[Any]], list[Any]]


def _split(row: RowProgram, operands: Sequence[Any]) -> _Split:
    """Evaluates what no mapped input reaches, and returns the rest as a function of one row."""
    jaxpr = row.jaxpr
    axes = dict(zip(jaxpr.invars, row.in_axes, strict=True))
    values = dict(zip(jaxpr.invars, operands, strict=True))
    varying = {var for var, axis in axes.items() if axis is not None}
    for equation in jaxpr.eqns:
        if equation.effects or not varying.isdisjoint(_variables(equation.invars)):
            varying.update(equation.outvars)

    def is_shared(atom: Any) -> bool:
        return isinstance(atom, Literal) or atom not in varying

    shared_equations = [
        each
        for each in jaxpr.eqns
        if not each.effects and all(is_shared(var) for var in each.outvars)
    ]
    worth = [each for each in shared_equations if each.primitive.name not in _CHEAP]
    shared_outputs = [var for var in _variables(jaxpr.outvars) if is_shared(var)]
    hoisted = _needed(
        shared_equations, [*shared_outputs, *(var for each in worth for var in each.outvars)]
    )
    done = {var for each in worth for var in each.outvars}
    left = _needed(
        [each for each in jaxpr.eqns if done.isdisjoint(each.outvars)],
        [var for var in _variables(jaxpr.outvars) if not is_shared(var)],
    )

    results = [var for each in hoisted for var in each.outvars if not isinstance(var, DropVar)]
    values |= zip(results, _evaluate(jaxpr, hoisted, results, values), strict=True)

    made = {var for each in left for var in each.outvars}
    varying_outputs = [var for var in jaxpr.outvars if not is_shared(var)]
    used = dict.fromkeys(
        var
        for var in [*_variables(v for each in left for v in each.invars), *varying_outputs]
        if var not in made
    )

    def rest(*inputs: Any) -> list[Any]:
        return _evaluate(jaxpr, left, varying_outputs, dict(zip(used, inputs, strict=True)))

    pairs = list(zip(jaxpr.outvars, row.out_axes, strict=True))

    def complete(outputs: list[Any]) -> list[Any]:
        remaining = iter(outputs)
        return [
            _repeated(_read(values, atom), axis, row.batch_size, atom.aval)
            if is_shared(atom)
            else next(remaining)
            for atom, axis in pairs
        ]

    return _Split(
        rest=rest,
        inputs=[(values[var], axes.get(var)) for var in used],
        out_avals=[var.aval for var in varying_outputs],
        out_axes=[axis for atom, axis in pairs if not is_shared(atom)],
        complete=complete,
    )


def _needed(equations: list[Any], roots: list[Any]) -> list[Any]:
    """Returns those equations that `roots` depend on, and those with effects, in order."""
    wanted, kept = set(roots), []
    for equation in reversed(equations):
        if equation.effects or not wanted.isdisjoint(equation.outvars):
            wanted.update(_variables(equation.invars))
            kept.append(equation)
    return kept[::-1]


def _evaluate(jaxpr: Any, equations: list[Any], outputs: list[Any], values: Any) -> list[Any]:
    """Returns the values of `outputs` after some of a jaxpr's equations, from known values."""
    if not equations:
        return [_read(values, each) for each in outputs]
    made = {var for each in equations for var in each.outvars}
    inputs = dict.fromkeys(
        var
        for var in _variables([*(v for each in equations for v in each.invars), *outputs])
        if var not in made
    )
    part = jaxpr.replace(constvars=[], invars=list(inputs), outvars=list(outputs), eqns=equations)
    return jax.core.eval_jaxpr(part, (), *(values[var] for var in inputs))


def _variables(atoms: Any) -> list[Any]:
    return [each for each in atoms if not isinstance(each, Literal)]


def _read(values: Any, atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _row(leaf: Any, axis: int | None, index: Any) -> Any:
    if axis is None:
        return leaf
    if isinstance(index, int):
        return jax.lax.index_in_dim(leaf, index, axis, keepdims=False)
    return jax.lax.dynamic_index_in_dim(
        leaf, index, axis, keepdims=False, allow_negative_indices=False
    )


def _rows(leaf: Any, axis: int | None, start: Any, size: int) -> Any:
    if axis is None:
        return leaf
    return jax.lax.dynamic_slice_in_dim(leaf, start, size, axis, allow_negative_indices=False)


def _buffer(aval: Any, axis: int | None, batch_size: int) -> Any:
    """Returns room for the results of all rows. Every element of it is written by the loop."""
    shape = list(aval.shape)
    if axis is not None:
        shape.insert(axis, batch_size)
    return jax.lax.empty(tuple(shape), aval.dtype)


def _written(buffer: Any, result: Any, axis: int | None, start: Any, is_row: bool) -> Any:
    if axis is None:
        return result
    if is_row:
        result = jax.lax.expand_dims(result, (axis,))
    return jax.lax.dynamic_update_slice_in_dim(
        buffer, result, start, axis, allow_negative_indices=False
    )


def varying_axes(value: Any) -> frozenset[Any]:
    """Returns the axes of a `shard_map` mesh over which a value varies."""
    manual = getattr(jax.typeof(value), "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def _varying(value: Any, axes: frozenset[Any]) -> Any:
    missing = axes - varying_axes(value)
    return jax.lax.pcast(value, tuple(missing), to="varying") if missing else value


def _repeated(value: Any, axis: int | None, batch_size: int, aval: Any) -> Any:
    """Returns a result that is the same for every row, once per row along `axis`."""
    if axis is None:
        return value
    value = jnp.asarray(value)
    dimensions = [each for each in range(value.ndim + 1) if each != axis]
    shape = [*value.shape[:axis], batch_size, *value.shape[axis:]]
    return _weak_as(jax.lax.broadcast_in_dim(value, shape, dimensions), aval)


def _weak_as(value: Any, aval: Any) -> Any:
    """Returns `value` with the weak type of `aval`, which loops and buffers do not keep."""
    if not getattr(aval, "weak_type", False):
        return value
    return convert_element_type_p.bind(value, new_dtype=value.dtype, weak_type=True, sharding=None)
