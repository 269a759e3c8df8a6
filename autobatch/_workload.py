"""One call described: `fun` traced once on one example, with the axes of every leaf.

`jax.vmap` itself checks the call, so that its errors are the user's errors. How the example is
mapped over the batch is in `_mapping`; what identifies a workload on disk is in `_key`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.core
import jax.extend.core
import numpy as np
from jax.api_util import flatten_axes

from autobatch._leaves import Statics, needs_vmap
from autobatch._nesting import busy
from autobatch._reductions import (
    Axis,
    Reduction,
    added,
    check_reduction,
    finished,
    has_reduction,
    stacked,
)


@dataclass(frozen=True, kw_only=True)
class MapSpec:
    """What the user asked to map, and how: the arguments of `jax.vmap`.

    Attributes:
        fun: the per-example function.
        in_axes, out_axes, axis_name, axis_size, spmd_axis_name: as `jax.vmap` takes them.
        static_argnums: positional arguments that are passed on as they are.
        static_argnames: keyword arguments that are passed on as they are, and not mapped.
    """

    fun: Callable[..., Any]
    in_axes: Any = 0
    out_axes: Any = 0
    axis_name: Any = None
    axis_size: int | None = None
    spmd_axis_name: Any = None
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()

    def vmapped(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `jax.vmap` of `fun` under the user's axes, reductions included."""
        stacks = self.stacking(fun)
        if not has_reduction(self.out_axes):
            return stacks

        @functools.wraps(fun, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree.flatten(stacks(*args, **kwargs))
            axes = flatten_axes("out_axes", tree, self.out_axes)
            return jax.tree.unflatten(tree, map(_reduced, leaves, axes))

        return call

    def stacking(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `jax.vmap` of `fun`, or of a stand-in for it, with an axis for each reduction."""

        @functools.wraps(fun, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            static = {key: kwargs[key] for key in kwargs if key in self.static_argnames}
            mapped = {key: kwargs[key] for key in kwargs if key not in static}
            return self._vmap(functools.partial(fun, **static) if static else fun)(*args, **mapped)

        self._vmap(fun)  # what vmap refuses without a call, it refuses now
        return call

    def _vmap(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        return jax.vmap(
            fun,
            in_axes=self.in_axes,
            out_axes=stacked(self.out_axes),
            axis_name=self.axis_name,
            axis_size=self.axis_size,
            spmd_axis_name=self.spmd_axis_name,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RowProgram:
    """`fun` for one example, and how its operands and outputs are mapped. Plain data.

    Attributes:
        jaxpr: the program, without consts. Its operands are the closed-over arrays, then the
            arrays of the call.
        batch_size: rows of the batch.
        in_axes: for each operand the mapped axis, counted from 0, or None.
        out_axes: for each output the batch axis of the result, counted from 0, its reduction, or
            None.
        axis_name, spmd_axis_name: as `jax.vmap` takes them.
    """

    jaxpr: Any
    batch_size: int
    in_axes: tuple[int | None, ...]
    out_axes: tuple[Axis, ...]
    axis_name: Any = None
    spmd_axis_name: Any = None

    @property
    def is_mapped(self) -> bool:
        """Whether any operand has a batch axis."""
        return any(axis is not None for axis in self.in_axes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A call of a mapped function, described.

    Attributes:
        row: the program of one example; None if only `jax.vmap` itself can map this call.
        consts: the closed-over arrays.
        arguments: shape and dtype of each array of the call, batch axis included.
        in_axes: for each array the mapped axis, counted from 0, or None.
        batch_size: rows of the batch.
        statics: what of the call is no array.
        out_tree: structure of `fun`'s result.
        moving: positions of the operands that are differentiated, if this is the value and the
            pullback of a call and not the call itself; else None.
        rules: what tells the user's own derivative rules from others, if there are any.
    """

    row: RowProgram | None
    consts: tuple[Any, ...]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    in_axes: tuple[int | None, ...]
    batch_size: int
    statics: Statics
    out_tree: Any
    moving: tuple[int, ...] | None = None
    rules: str | None = None

    @property
    def sums(self) -> list[bool]:
        """For each result, whether it is a sum or a mean over the rows, whose terms may cancel."""
        if self.row is None:
            return []
        axes = self.row.in_axes
        return [
            *(isinstance(axis, Reduction) for axis in self.row.out_axes),
            *(axes[at] is None for at in self.moving or ()),
        ]

    def serves(self, arrays: list[Any], statics: Statics) -> bool:
        """Returns whether this describes a call with these arrays, by shape and dtype."""
        return statics == self.statics and all(
            array.shape == argument.shape and array.dtype == argument.dtype
            for array, argument in zip(arrays, self.arguments, strict=True)
        )


class _SpecialResult(Exception):
    """Ends the description of a function whose result only `jax.vmap` can put together."""


def describe(spec: MapSpec, arrays: list[Any], statics: Statics) -> Workload:
    """Returns the workload of a call; runs `fun` once, on one abstract example.

    Args:
        spec: the function and its axes.
        arrays: the arrays of the call, concrete or traced; only shapes are looked at.
        statics: what else the call holds.

    Raises:
        ValueError, TypeError: whatever `jax.vmap` raises for this call, and what `fun` raises.
    """
    traced: dict[str, Any] = {"jaxpr": None, "out_tree": None}

    @functools.wraps(spec.fun, updated=())
    def spy(*example: Any, **keywords: Any) -> Any:
        leaves, tree = jax.tree.flatten((example, keywords))
        static = _positions(statics)

        # A function of its own every time: JAX would remember the trace of `fun` itself, and with
        # it closed-over values that may have changed since. It returns leaves, because a user's
        # containers may refuse to hold anything but arrays.
        @functools.wraps(spec.fun, updated=())
        def fun(*row: Any) -> Any:
            args, kwargs = statics.rebuilt(row, tree)
            result = spec.fun(*args, **kwargs)
            if needs_vmap(result):
                raise _SpecialResult
            outputs, traced["out_tree"] = jax.tree.flatten(result)
            return outputs

        row = [leaf for position, leaf in enumerate(leaves) if position not in static]
        traced["jaxpr"] = jaxpr = jax.make_jaxpr(fun)(*row)
        if None in jax.tree.leaves(spec.out_axes, is_leaf=lambda axis: axis is None):
            # Whether an output without an axis depends on the row, only vmap itself can tell.
            outputs = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *row)
        else:
            # vmap checks `out_axes` against trees and ranks, which a one-element array also has.
            outputs = [np.zeros((1,) * len(each.shape), bool) for each in jaxpr.out_avals]
        return jax.tree.unflatten(traced["out_tree"], outputs)

    def whole(arrays: list[Any]) -> Any:
        traced["arguments"] = tuple(shape_of(each) for each in arrays)
        args, kwargs = statics.rebuilt(arrays)
        fun = spec.fun if needs_vmap((args, kwargs)) else spy
        return jax.tree.leaves(spec.stacking(fun)(*args, **kwargs))

    with busy(), contextlib.suppress(_SpecialResult):
        jax.eval_shape(whole, arrays)
    arguments = traced["arguments"]
    positions = [at for at in range(statics.tree.num_leaves) if at not in _positions(statics)]
    axes = flatten_axes("in_axes", statics.tree, (_as_tuple(spec.in_axes), 0))
    in_axes = tuple(
        None if axis is None else axis % len(argument.shape)
        for axis, argument in zip([axes[at] for at in positions], arguments, strict=True)
    )
    sizes = [
        each.shape[axis] for each, axis in zip(arguments, in_axes, strict=True) if axis is not None
    ]
    batch_size = sizes[0] if sizes else spec.axis_size or 0
    row, closed, out_tree = None, traced["jaxpr"], traced["out_tree"]
    if closed is not None:
        jaxpr = closed.jaxpr
        row = RowProgram(
            jaxpr=jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]),
            batch_size=batch_size,
            in_axes=(None,) * len(closed.consts) + in_axes,
            out_axes=_out_axes(spec.out_axes, out_tree, jaxpr.outvars, batch_size),
            axis_name=spec.axis_name,
            spmd_axis_name=spec.spmd_axis_name,
        )
    return Workload(
        row=row,
        consts=() if closed is None else tuple(closed.consts),
        arguments=arguments,
        in_axes=in_axes,
        batch_size=batch_size,
        statics=statics,
        out_tree=out_tree,
    )


def without_unused(row: RowProgram) -> tuple[RowProgram, list[int]]:
    """Returns the program without the operands that it does not use, and the places of the others.

    jit drops unused arguments, but does not look for them behind a custom rule.
    """
    jaxpr = row.jaxpr
    used = {
        each
        for each in (*(var for eqn in jaxpr.eqns for var in eqn.invars), *jaxpr.outvars)
        if not isinstance(each, jax.extend.core.Literal)
    }
    kept = [at for at, var in enumerate(jaxpr.invars) if var in used]
    smaller = replace(
        row,
        jaxpr=jaxpr.replace(invars=[jaxpr.invars[at] for at in kept]),
        in_axes=tuple(row.in_axes[at] for at in kept),
    )
    return smaller, kept


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation of a jaxpr, those inside loops, branches and calls included."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def _as_tuple(axes: Any) -> Any:
    return tuple(axes) if isinstance(axes, list) else axes


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, concrete or traced, or of what one refers to."""
    aval = jax.typeof(array)
    aval = getattr(aval, "inner_aval", aval)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _out_axes(axes: Any, tree: Any, outputs: list[Any], batch_size: Any) -> tuple[Axis, ...]:
    def counted(axis: Axis, aval: Any) -> Axis:
        if isinstance(axis, Reduction):
            check_reduction(axis, aval.dtype, batch_size)
        return axis % (len(aval.shape) + 1) if isinstance(axis, int) else axis

    flat = flatten_axes("out_axes", tree, axes)
    return tuple(counted(axis, each.aval) for axis, each in zip(flat, outputs, strict=True))


def _reduced(rows: Any, axis: Axis) -> Any:
    """Returns rows that are stacked along the first axis reduced, if they are to be."""
    if not isinstance(axis, Reduction):
        return rows
    check_reduction(axis, rows.dtype, rows.shape[0])
    return finished(added(rows), axis, rows.shape[0], jax.typeof(rows))


def _positions(statics: Statics) -> set[int]:
    return {position for position, _, _ in statics.values}
