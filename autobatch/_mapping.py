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
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p

from autobatch._devices import is_inside_shard_map
from autobatch._hoisting import split
from autobatch._reductions import Axis, Reduction, accumulator_dtype, added, finished, stacked
from autobatch._strategies import VMAP, Strategy, balanced_chunk
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
    outputs = jax.vmap(
        lambda *each: jax.core.eval_jaxpr(row.jaxpr, (), *each),
        in_axes=row.in_axes,
        out_axes=stacked(list(row.out_axes)),
        axis_name=row.axis_name,
        axis_size=size,
        spmd_axis_name=row.spmd_axis_name,
    )(*operands)
    return [
        _weak_as(finished(added(each), axis, size, each.dtype), var.aval)
        if isinstance(axis, Reduction)
        else each
        for each, axis, var in zip(outputs, row.out_axes, row.jaxpr.outvars, strict=True)
    ]


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
        cut.rest(*(_row(leaf, axis, index) for leaf, axis in cut.inputs))
        for index in range(row.batch_size)
    ]
    outputs = [
        _together(column, axis, aval)
        for column, axis, aval in zip(
            zip(*rows, strict=True), cut.out_axes, cut.out_avals, strict=True
        )
    ]
    return cut.merged(outputs, functools.partial(_repeated, row.batch_size))


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
            return _weak_as(finished(total, axis, len(column), aval.dtype), aval)


def _looped(row: RowProgram, operands: Sequence[Any], chunk: int | None) -> list[Any]:
    """Returns the outputs of a loop over rows, or over chunks of `chunk` rows."""
    cut, batch_size = split(row, operands), row.batch_size
    size = chunk or 1
    steps = -(-batch_size // size)

    def step(index: Any, buffers: list[Any]) -> list[Any]:
        start = index * size
        if batch_size % size:
            start = jnp.minimum(start, batch_size - size)
        if chunk is None:
            results = cut.rest(*(_row(leaf, axis, start) for leaf, axis in cut.inputs))
        else:
            results = jax.vmap(
                cut.rest,
                in_axes=[axis for _, axis in cut.inputs],
                out_axes=stacked(cut.out_axes),
                axis_size=size,
            )(*(_rows(leaf, axis, start, size) for leaf, axis in cut.inputs))
        # The last chunk overlaps the one before it: so many of its rows have been counted.
        counted = index * size - start if batch_size % size else None
        return [
            _summed(buffer, jnp.asarray(result), counted, chunk is None)
            if isinstance(axis, Reduction)
            else _written(buffer, jnp.asarray(result), axis, start, chunk is None)
            for buffer, result, axis in zip(buffers, results, cut.out_axes, strict=True)
        ]

    buffers = [
        _buffer(aval, axis, batch_size)
        for aval, axis in zip(cut.out_avals, cut.out_axes, strict=True)
    ]
    if is_inside_shard_map():
        # A loop's state must vary over the mesh from the beginning if it does later.
        after = jax.make_jaxpr(step)(0, buffers).out_avals
        buffers = [_varying(each, aval) for each, aval in zip(buffers, after, strict=True)]
    buffers = jax.lax.fori_loop(0, steps, step, buffers)
    outputs = [
        _weak_as(
            finished(buffer, axis, batch_size, aval.dtype)
            if isinstance(axis, Reduction)
            else buffer,
            aval,
        )
        for buffer, axis, aval in zip(buffers, cut.out_axes, cut.out_avals, strict=True)
    ]
    return cut.merged(outputs, functools.partial(_repeated, batch_size))


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


def _buffer(aval: Any, axis: Axis, batch_size: int) -> Any:
    """Returns room for the results of all rows. Every element of it is written by the loop."""
    if isinstance(axis, Reduction):
        return jnp.zeros(aval.shape, accumulator_dtype(aval.dtype))
    shape = list(aval.shape)
    if axis is not None:
        shape.insert(axis, batch_size)
    return jax.lax.empty(tuple(shape), aval.dtype)


def _summed(total: Any, result: Any, counted: Any, is_row: bool) -> Any:
    """Returns a sum with the results of one more step added, of rows that were not counted yet."""
    if is_row:
        return total + jax.lax.convert_element_type(result, total.dtype)
    if counted is not None:
        is_new = jax.lax.broadcasted_iota(jnp.int32, result.shape, 0) >= counted
        result = jnp.where(is_new, result, jnp.zeros((), result.dtype))
    return total + added(result)


def _written(buffer: Any, result: Any, axis: int | None, start: Any, is_row: bool) -> Any:
    if axis is None:
        return result
    if is_row:
        result = jax.lax.expand_dims(result, (axis,))
    return jax.lax.dynamic_update_slice_in_dim(
        buffer, result, start, axis, allow_negative_indices=False
    )


def _varying(value: Any, like: Any) -> Any:
    """Returns `value`, which varies nowhere, varying over the mesh axes that an aval does."""
    manual = getattr(like, "manual_axis_type", None)
    axes = () if manual is None else tuple(manual.varying)
    return jax.lax.pcast(value, axes, to="varying") if axes else value


def _repeated(batch_size: int, value: Any, aval: Any, axis: Axis) -> Any:
    """Returns a result that is the same for every row, once per row along `axis`, or reduced."""
    if axis is None:
        return value
    value = jnp.asarray(value)
    if isinstance(axis, Reduction):
        dtype = accumulator_dtype(aval.dtype)
        total = jnp.asarray(value, dtype) * jnp.asarray(batch_size, dtype)
        return _weak_as(finished(total, axis, batch_size, aval.dtype), aval)
    dimensions = [each for each in range(value.ndim + 1) if each != axis]
    shape = [*value.shape[:axis], batch_size, *value.shape[axis:]]
    return _weak_as(jax.lax.broadcast_in_dim(value, shape, dimensions), aval)


def _weak_as(value: Any, aval: Any) -> Any:
    """Returns `value` with the weak type of `aval`, which loops and buffers do not keep."""
    if not getattr(aval, "weak_type", False):
        return value
    return convert_element_type_p.bind(value, new_dtype=value.dtype, weak_type=True, sharding=None)
