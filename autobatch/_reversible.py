"""The strategies as programs to be differentiated: loops that reverse mode can walk back.

The loops of `_mapping` carry whole outputs and read whole inputs in every step; reverse mode would
keep all that for each of them. Here a step returns its rows, and inputs that are differentiated are
cut up before the loop. With `remat` a step is a `jax.checkpoint`: all that is kept of it is where
its rows are, so that memory is bounded by one step. It is what one writes by hand: a `jax.lax.scan`
over checkpointed chunks, and one more for the remainder. No row is computed twice, as in the loops
of `_mapping`: a user's rule for a derivative may make something of a cotangent of zero.
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
from autobatch._reductions import Reduction, accumulator_dtype, finished, weak_as
from autobatch._rows import repeated, row_at, rows_at, sum_of, varying
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
    if row.is_mapped and isinstance(size, int) and size:
        if strategy.family == "map":
            return _scanned(row, operands, moving, None, strategy.remat)
        if chunk_size is not None and chunk_size < size:
            chunk = balanced_chunk(size, chunk_size)
            return _scanned(row, operands, moving, chunk, strategy.remat)

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
    steps, remainder = divmod(batch_size, size)
    own = [operands[at] for at in moving if row.in_axes[at] is not None]
    is_own = [any(leaf is each for each in own) for leaf, _ in cut.inputs]
    slices = [
        jnp.moveaxis(leaf, axis or 0, 0)
        for (leaf, axis), is_cut_up in zip(cut.inputs, is_own, strict=True)
        if is_cut_up
    ]

    def of_rows(count: int | None, start: Any, slices: Sequence[Any]) -> tuple[list[Any], ...]:
        """Returns what a step of so many rows carries on, and its rows of the other outputs."""
        inputs, axes = _inputs(cut.inputs, is_own, iter(slices), start, count)
        if count is None:
            results = cut.rest(*inputs)
        else:
            results = jax.vmap(
                cut.rest,
                in_axes=axes,
                out_axes=[None if axis is None else 0 for axis in cut.out_axes],
                axis_size=count,
            )(*inputs)
        carried, rows = [], []
        for result, axis in zip(results, cut.out_axes, strict=True):
            match axis:
                case Reduction():
                    carried.append(sum_of(result, None, count is None))
                case None:
                    carried.append(jnp.asarray(result))
                case int():
                    rows.append(result)
        return carried, rows

    carried_axes = [axis for axis in cut.out_axes if not isinstance(axis, int)]

    def after(before: list[Any], count: int | None, start: Any, slices: Any) -> Any:
        """Returns the state after a step, and its rows."""
        run = functools.partial(of_rows, count)
        # Each step is one of a loop: what follows cannot be merged with what comes before.
        carried, rows = (jax.checkpoint(run, prevent_cse=False) if remat else run)(start, slices)
        return [
            old + new if isinstance(axis, Reduction) else new
            for old, new, axis in zip(before, carried, carried_axes, strict=True)
        ], rows

    def step(before: list[Any], each: Any) -> Any:
        index, slices = each
        return after(before, chunk, index * size, slices)

    state = [
        jnp.zeros(aval.shape, accumulator_dtype(aval.dtype) if axis is not None else aval.dtype)
        for aval, axis in zip(cut.out_avals, cut.out_axes, strict=True)
        if not isinstance(axis, int)
    ]
    in_steps = [leaf[: steps * size] for leaf in slices]
    if chunk is not None:
        in_steps = [leaf.reshape(steps, chunk, *leaf.shape[1:]) for leaf in in_steps]
    xs = (jnp.arange(steps, dtype=jnp.int32), in_steps)
    if is_inside_shard_map():
        # A loop's state must vary over the mesh from the beginning if it does later.
        first = jax.tree.map(lambda each: each[0], xs)
        avals = jax.make_jaxpr(step)(state, first).out_avals
        state = [varying(each, aval) for each, aval in zip(state, avals, strict=False)]
    state, rows = jax.lax.scan(step, state, xs)
    if chunk is not None:
        rows = [each.reshape(steps * size, *each.shape[2:]) for each in rows]
    if remainder:
        rest = [leaf[steps * size :] for leaf in slices]
        state, last = after(state, remainder, jnp.int32(steps * size), rest)
        rows = [jnp.concatenate(pair) for pair in zip(rows, last, strict=True)]
    carried, stacked = iter(state), iter(rows)
    outputs = []
    for axis, aval in zip(cut.out_axes, cut.out_avals, strict=True):
        match axis:
            case Reduction():
                output = finished(next(carried), axis, batch_size, aval)
            case None:
                output = next(carried)
            case int():
                output = jnp.moveaxis(next(stacked), 0, axis)
        outputs.append(weak_as(output, aval))
    return cut.merged(outputs, functools.partial(repeated, batch_size))


def _inputs(
    leaves: Sequence[tuple[Any, int | None]],
    is_own: Sequence[bool],
    slices: Iterator[Any],
    start: Any,
    count: int | None,
) -> tuple[list[Any], list[int | None]]:
    """Returns what one step reads, and the axis along which its rows lie."""
    inputs: list[Any] = []
    axes: list[int | None] = []
    for (leaf, axis), is_cut_up in zip(leaves, is_own, strict=True):
        if is_cut_up:
            inputs.append(next(slices))
            axes.append(0)
        else:
            inputs.append(
                row_at(leaf, axis, start) if count is None else rows_at(leaf, axis, start, count)
            )
            axes.append(axis)
    return inputs, axes
