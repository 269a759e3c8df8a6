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
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p

from autobatch._devices import is_inside_shard_map
from autobatch._hoisting import split
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
    return jax.vmap(
        lambda *each: jax.core.eval_jaxpr(row.jaxpr, (), *each),
        in_axes=row.in_axes,
        out_axes=list(row.out_axes),
        axis_name=row.axis_name,
        axis_size=size,
        spmd_axis_name=row.spmd_axis_name,
    )(*operands)


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
        column[-1]
        if axis is None
        else jax.lax.concatenate([jnp.expand_dims(each, axis) for each in column], axis)
        for column, axis in zip(zip(*rows, strict=True), cut.out_axes, strict=True)
    ]
    return cut.merged(outputs, functools.partial(_repeated, row.batch_size))


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
                out_axes=list(cut.out_axes),
                axis_size=size,
            )(*(_rows(leaf, axis, start, size) for leaf, axis in cut.inputs))
        return [
            _written(buffer, jnp.asarray(result), axis, start, chunk is None)
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
    outputs = [_weak_as(buffer, aval) for buffer, aval in zip(buffers, cut.out_avals, strict=True)]
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


def _varying(value: Any, like: Any) -> Any:
    """Returns `value`, which varies nowhere, varying over the mesh axes that an aval does."""
    manual = getattr(like, "manual_axis_type", None)
    axes = () if manual is None else tuple(manual.varying)
    return jax.lax.pcast(value, axes, to="varying") if axes else value


def _repeated(batch_size: int, value: Any, aval: Any, axis: int | None) -> Any:
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
