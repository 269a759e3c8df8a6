"""What a step of a loop over rows reads and leaves: slices, buffers, sums, and their types."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autobatch._reductions import Axis, Reduction, accumulator_dtype, added, finished, weak_as


def row_at(leaf: Any, axis: int | None, index: Any) -> Any:
    """Returns one row of a leaf, or all of a leaf that is not mapped."""
    if axis is None:
        return leaf
    if isinstance(index, int):
        return jax.lax.index_in_dim(leaf, index, axis, keepdims=False)
    return jax.lax.dynamic_index_in_dim(
        leaf, index, axis, keepdims=False, allow_negative_indices=False
    )


def rows_at(leaf: Any, axis: int | None, start: Any, size: int) -> Any:
    """Returns `size` rows of a leaf, or all of a leaf that is not mapped."""
    if axis is None:
        return leaf
    return jax.lax.dynamic_slice_in_dim(leaf, start, size, axis, allow_negative_indices=False)


def room(aval: Any, axis: int | None, batch_size: int) -> Any:
    """Returns room for the results of all rows. Every element of it is written by the loop."""
    shape = list(aval.shape)
    if axis is not None:
        shape.insert(axis, batch_size)
    return jax.lax.empty(tuple(shape), aval.dtype)


def sum_of(result: Any, counted: Any, is_row: bool) -> Any:
    """Returns the sum of a step's results, of rows that were not counted yet, to be added up.

    Args:
        result: of one row, or of several along the first axis.
        counted: how many of the first rows an earlier step has counted; None where none is.
        is_row: whether it is one row.
    """
    result = jnp.asarray(result)
    if is_row:
        return jax.lax.convert_element_type(result, accumulator_dtype(result.dtype))
    return added(without_counted(result, counted))


def without_counted(rows: Any, counted: Any) -> Any:
    """Returns rows, of which those that an earlier step has counted are zero.

    Args:
        rows: along the first axis.
        counted: how many of the first were; None where none is.
    """
    if counted is None:
        return rows
    is_new = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0) >= counted
    return jnp.where(is_new, rows, jnp.zeros((), rows.dtype))


def written(buffer: Any, result: Any, axis: int | None, start: Any, is_row: bool) -> Any:
    """Returns a buffer of all rows with those of one step written from `start` on."""
    if axis is None:
        return result
    if is_row:
        result = jax.lax.expand_dims(result, (axis,))
    return jax.lax.dynamic_update_slice_in_dim(
        buffer, result, start, axis, allow_negative_indices=False
    )


def varying(value: Any, like: Any) -> Any:
    """Returns `value`, which varies nowhere, varying over the mesh axes that an aval does."""
    manual = getattr(like, "manual_axis_type", None)
    axes = () if manual is None else tuple(manual.varying)
    return jax.lax.pcast(value, axes, to="varying") if axes else value


def repeated(batch_size: int, value: Any, aval: Any, axis: Axis) -> Any:
    """Returns a result that is the same for every row, once per row along `axis`, or reduced."""
    if axis is None:
        return value
    value = jnp.asarray(value)
    if isinstance(axis, Reduction):
        dtype = accumulator_dtype(aval.dtype)
        total = jnp.asarray(value, dtype) * jnp.asarray(batch_size, dtype)
        return finished(total, axis, batch_size, aval)
    dimensions = [each for each in range(value.ndim + 1) if each != axis]
    shape = [*value.shape[:axis], batch_size, *value.shape[axis:]]
    return weak_as(jax.lax.broadcast_in_dim(value, shape, dimensions), aval)
