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

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from autobatch._convolution import canonical
from autobatch._devices import has_mesh, is_inside_shard_map, is_sharding_in_force
from autobatch._hoisting import Split, split
from autobatch._reductions import (
    Axis,
    Reduction,
    accumulator_dtype,
    added,
    finished,
    has_reduction,
    stacked,
    weak_as,
)
from autobatch._rewriting import without_calls
from autobatch._rows import repeated, room, row_at, rows_at, varying, written
from autobatch._strategies import VMAP, Strategy, balanced_chunk
from autobatch._summation import Summation, summation
from autobatch._workload import RowProgram


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
    if row.is_mapped and isinstance(size, int) and size:
        match strategy.family:
            case "unrolled":
                return _unrolled(row, operands)
            case "map":
                return _looped(row, operands, None)
            case "chunked" if strategy.chunk_size is not None and strategy.chunk_size < size:
                return _looped(row, operands, balanced_chunk(size, strategy.chunk_size))
            case _:
                pass
    if has_reduction(row.out_axes) and _is_plain(row, operands):
        return _summed(row, operands)
    outputs = jax.vmap(
        lambda *each: jax.core.eval_jaxpr(row.jaxpr, (), *each),
        in_axes=row.in_axes,
        out_axes=stacked(list(row.out_axes)),
        axis_name=row.axis_name,
        axis_size=size,
        spmd_axis_name=row.spmd_axis_name,
    )(*operands)
    return [
        finished(added(each), axis, size, var.aval) if isinstance(axis, Reduction) else each
        for each, axis, var in zip(outputs, row.out_axes, row.jaxpr.outvars, strict=True)
    ]


def _is_plain(row: RowProgram, operands: Sequence[Any]) -> bool:
    """Returns whether a program has rows, and nothing but values comes of it, on one device."""
    has_rows = row.is_mapped and isinstance(row.batch_size, int) and row.batch_size > 0
    is_spread = is_sharding_in_force() or any(has_mesh(jax.typeof(each)) for each in operands)
    return has_rows and not row.jaxpr.effects and row.spmd_axis_name is None and not is_spread


def check(row: RowProgram, operands: Sequence[Any]) -> None:
    """Traces what `jax.vmap` makes of this program; other strategies would accept what it refuses.

    Args:
        row: the function of one example, and the axes.
        operands: the closed-over arrays, then those of the call.

    Raises:
        ValueError, TypeError, NotImplementedError: whatever `jax.vmap` raises.
    """
    jax.eval_shape(lambda *each: mapped(VMAP, row, each), *operands)


def _unrolled(row: RowProgram, operands: Sequence[Any]) -> list[Any]:
    cut = split(row, operands)
    rows = [
        cut.rest(*(row_at(leaf, axis, index) for leaf, axis in cut.inputs))
        for index in range(row.batch_size)
    ]
    outputs = [
        _together(column, axis, aval)
        for column, axis, aval in zip(
            zip(*rows, strict=True), cut.out_axes, cut.out_avals, strict=True
        )
    ]
    return cut.merged(outputs, functools.partial(repeated, row.batch_size))


def _together(column: Sequence[Any], axis: Axis, aval: Any) -> Any:
    """Returns one output of all rows."""
    match axis:
        case None:
            return column[-1]
        case int():
            return jax.lax.concatenate([jnp.expand_dims(each, axis) for each in column], axis)
        case Reduction():
            dtype = accumulator_dtype(aval.dtype)
            total = functools.reduce(operator.add, (jnp.asarray(each, dtype) for each in column))
            return finished(total, axis, len(column), aval)


def _summed(row: RowProgram, operands: Sequence[Any]) -> list[Any]:
    """Returns the outputs of all rows at once, of which some are reduced."""
    cut, size = split(_opened(row), operands), row.batch_size
    total = _summation(row, cut, cut.jaxpr)
    results = jax.vmap(
        functools.partial(jax.core.eval_jaxpr, total.head, ()),
        in_axes=[axis for _, axis in cut.inputs],
        out_axes=_out_axes(cut, total),
        axis_name=row.axis_name,
        axis_size=size,
        spmd_axis_name=row.spmd_axis_name,
    )(*(leaf for leaf, _ in cut.inputs))
    others, values = total.parts(results)
    return _finished(row, cut, total, others, total.added(total.zeros(), values))


def _looped(row: RowProgram, operands: Sequence[Any], chunk: int | None) -> list[Any]:
    """Returns the outputs of a loop over rows, or over chunks of `chunk` rows."""
    cut, batch_size = split(_opened(row), operands), row.batch_size
    total = _summation(row, cut, canonical(cut.jaxpr))
    evaluate = functools.partial(jax.core.eval_jaxpr, total.head, ())
    out_axes = _out_axes(cut, total)
    size = chunk or 1
    steps = -(-batch_size // size)

    def step(index: Any, state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        buffers, sums = state
        start = index * size
        if batch_size % size:
            start = jnp.minimum(start, batch_size - size)
        if chunk is None:
            results = evaluate(*(row_at(leaf, axis, start) for leaf, axis in cut.inputs))
        else:
            results = jax.vmap(
                evaluate,
                in_axes=[axis for _, axis in cut.inputs],
                out_axes=out_axes,
                axis_size=size,
            )(*(rows_at(leaf, axis, start, size) for leaf, axis in cut.inputs))
        others, values = total.parts(results)
        # The last chunk overlaps the one before it: so many of its rows have been counted.
        counted = index * size - start if batch_size % size else None
        sums = total.added(sums, values, counted, is_row=chunk is None)
        return [
            written(buffer, jnp.asarray(result), axis, start, chunk is None)
            for buffer, result, axis in zip(buffers, others, out_axes, strict=False)
        ], sums

    buffers = [
        room(aval, axis, batch_size)
        for aval, axis in zip(cut.out_avals, cut.out_axes, strict=True)
        if not isinstance(axis, Reduction)
    ]
    state = buffers, total.zeros()
    if is_inside_shard_map():
        # A loop's state must vary over the mesh from the beginning if it does later.
        leaves, tree = jax.tree.flatten(state)
        after = jax.make_jaxpr(step)(0, state).out_avals
        state = jax.tree.unflatten(tree, map(varying, leaves, after))
    others, sums = jax.lax.fori_loop(0, steps, step, state)
    return _finished(row, cut, total, others, sums)


def _opened(row: RowProgram) -> RowProgram:
    """Returns the program without calls, where it has sums: they may hide products."""
    if not has_reduction(row.out_axes):
        return row
    return replace(row, jaxpr=without_calls(row.jaxpr, [axis is not None for axis in row.in_axes]))


def _summation(row: RowProgram, cut: Split, jaxpr: Any) -> Summation:
    return summation(
        jaxpr,
        [axis is not None for _, axis in cut.inputs],
        [isinstance(axis, Reduction) for axis in cut.out_axes],
        row.batch_size,
    )


def _out_axes(cut: Split, total: Summation) -> list[int | None]:
    """Returns where the rows of the results of `total.head` go: those of terms along axis 0."""
    axes = [axis for axis in cut.out_axes if not isinstance(axis, Reduction)]
    return axes + [0] * sum(each.count for each in total.terms)


def _finished(
    row: RowProgram, cut: Split, total: Summation, others: Sequence[Any], sums: Sequence[Any]
) -> list[Any]:
    """Returns all outputs, given those that are not reduced, and what the others are made of."""
    unsummed, summed = iter(others), iter(total.finished(sums, [leaf for leaf, _ in cut.inputs]))
    outputs = [
        finished(next(summed), axis, row.batch_size, aval)
        if isinstance(axis, Reduction)
        else weak_as(next(unsummed), aval)
        for axis, aval in zip(cut.out_axes, cut.out_avals, strict=True)
    ]
    return cut.merged(outputs, functools.partial(repeated, row.batch_size))
