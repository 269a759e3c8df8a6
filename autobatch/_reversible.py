"""The strategies as programs to be differentiated: loops that reverse mode can walk back.

The loops of `_mapping` carry whole outputs and read whole inputs in every step; reverse mode would
keep all that for each of them. Here a step returns its rows, and inputs that are differentiated are
cut up before the loop. With `remat` a step is a `jax.checkpoint`: all that is kept of it is where
its rows are, so that memory is bounded by one step. It is what one writes by hand, a `jax.lax.scan`
over checkpointed chunks, but that the last chunk overlaps the one before it instead of leaving a
remainder that has to be traced and compiled again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from autobatch._devices import is_inside_shard_map
from autobatch._hoisting import split
from autobatch._loop_convolution import for_loops
from autobatch._mapping import mapped
from autobatch._reductions import Reduction, accumulator_dtype, finished
from autobatch._rows import repeated, row_at, rows_at, sum_of, varying, weak_as
from autobatch._strategies import VMAP, Strategy, balanced_chunk
from autobatch._workload import RowProgram


def reversible(
    strategy: Strategy, row: RowProgram, operands: Sequence[Any], moving: Sequence[int]
) -> list[Any]:
    """Returns the outputs of `mapped`, from a program that is to be differentiated.

    Args:
        strategy: how to map.
        row: the function of one example, and the axes.
        operands: the closed-over arrays, then those of the call, batch axes included.
        moving: positions of the operands that are differentiated.

    Raises:
        ValueError, TypeError: as `mapped`.
    """
    size, chunk_size = row.batch_size, strategy.chunk_size
    if row.is_mapped and size and strategy.family == "map":
        return _scanned(row, operands, moving, None, strategy.remat)
    if row.is_mapped and size and chunk_size is not None and chunk_size < size:
        return _scanned(row, operands, moving, balanced_chunk(size, chunk_size), strategy.remat)

    def whole(*each: Any) -> list[Any]:
        return mapped(VMAP if chunk_size else strategy, row, each)

    return (jax.checkpoint(whole) if strategy.remat else whole)(*operands)


def _scanned(
    row: RowProgram,
    operands: Sequence[Any],
    moving: Sequence[int],
    chunk: int | None,
    remat: bool,
) -> list[Any]:
    """Returns the outputs of a loop over rows, or over chunks of `chunk` rows."""
    cut, batch_size = split(row, operands), row.batch_size
    cut = replace(cut, jaxpr=for_loops(cut.jaxpr))
    size = chunk or 1
    steps = -(-batch_size // size)
    sliced = [operands[at] for at in moving if row.in_axes[at] is not None]
    is_sliced = [any(leaf is each for each in sliced) for leaf, _ in cut.inputs]
    slices = [
        _cut_up(leaf, axis or 0, chunk, steps)
        for (leaf, axis), is_own in zip(cut.inputs, is_sliced, strict=True)
        if is_own
    ]

    def of_rows(index: Any, own: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the results of one step that are carried on, and its rows of the others."""
        start = index * size
        if batch_size % size:
            start = jnp.minimum(start, batch_size - size)
        inputs, axes = _inputs(cut.inputs, is_sliced, iter(own), start, chunk)
        if chunk is None:
            results = cut.rest(*inputs)
        else:
            results = jax.vmap(
                cut.rest,
                in_axes=axes,
                out_axes=[None if axis is None else 0 for axis in cut.out_axes],
                axis_size=size,
            )(*inputs)
        counted = index * size - start if batch_size % size else None
        carried, rows = [], []
        for result, axis in zip(results, cut.out_axes, strict=True):
            match axis:
                case Reduction():
                    carried.append(sum_of(result, counted, chunk is None))
                case None:
                    carried.append(jnp.asarray(result))
                case int():
                    rows.append(result)
        return carried, rows

    # Each step is one of a loop: what follows cannot be merged with what comes before.
    one_step = jax.checkpoint(of_rows, prevent_cse=False) if remat else of_rows
    carried_axes = [axis for axis in cut.out_axes if not isinstance(axis, int)]

    def step(before: list[Any], each: Any) -> tuple[list[Any], list[Any]]:
        carried, rows = one_step(*each)
        after = [
            old + new if isinstance(axis, Reduction) else new
            for old, new, axis in zip(before, carried, carried_axes, strict=True)
        ]
        return after, rows

    start = [
        jnp.zeros(aval.shape, accumulator_dtype(aval.dtype) if axis is not None else aval.dtype)
        for aval, axis in zip(cut.out_avals, cut.out_axes, strict=True)
        if not isinstance(axis, int)
    ]
    xs = (jnp.arange(steps, dtype=jnp.int32), slices)
    if is_inside_shard_map():
        # A loop's state must vary over the mesh from the beginning if it does later.
        first = jax.tree.map(lambda each: each[0], xs)
        after = jax.make_jaxpr(step)(start, first).out_avals
        start = [varying(each, aval) for each, aval in zip(start, after, strict=False)]
    carried, rows = map(iter, jax.lax.scan(step, start, xs))
    outputs = []
    for axis, aval in zip(cut.out_axes, cut.out_avals, strict=True):
        match axis:
            case Reduction():
                output = finished(next(carried), axis, batch_size, aval.dtype)
            case None:
                output = next(carried)
            case int():
                output = jnp.moveaxis(_put_together(next(rows), chunk, batch_size), 0, axis)
        outputs.append(weak_as(output, aval))
    return cut.merged(outputs, functools.partial(repeated, batch_size))


def _inputs(
    leaves: Sequence[tuple[Any, int | None]],
    is_sliced: Sequence[bool],
    own: Iterator[Any],
    start: Any,
    chunk: int | None,
) -> tuple[list[Any], list[int | None]]:
    """Returns what one step reads, and the axis along which its rows lie."""
    inputs: list[Any] = []
    axes: list[int | None] = []
    for (leaf, axis), is_own in zip(leaves, is_sliced, strict=True):
        if is_own:
            inputs.append(next(own))
            axes.append(0)
        else:
            inputs.append(
                row_at(leaf, axis, start) if chunk is None else rows_at(leaf, axis, start, chunk)
            )
            axes.append(axis)
    return inputs, axes


def _cut_up(leaf: Any, axis: int, chunk: int | None, steps: int) -> Any:
    """Returns the rows of every step along a first axis; the last chunk overlaps."""
    rows = jnp.moveaxis(leaf, axis, 0)
    if chunk is None:
        return rows
    if rows.shape[0] == steps * chunk:
        return rows.reshape(steps, chunk, *rows.shape[1:])
    before = rows[: (steps - 1) * chunk].reshape(steps - 1, chunk, *rows.shape[1:])
    return jnp.concatenate([before, rows[None, -chunk:]])


def _put_together(rows: Any, chunk: int | None, batch_size: int) -> Any:
    """Returns the rows of all steps along the first axis; those computed twice once."""
    if chunk is None:
        return rows
    steps, shape = rows.shape[0], rows.shape[2:]
    if batch_size == steps * chunk:
        return rows.reshape(batch_size, *shape)
    counted = steps * chunk - batch_size
    before = rows[:-1].reshape((steps - 1) * chunk, *shape)
    return jnp.concatenate([before, rows[-1, counted:]])
