"""One call described: `fun` traced once on one example, with the axes of every leaf.

`jax.vmap` itself checks the call, so that its errors are the user's errors. How the example is
mapped over the batch is in `_mapping`; what identifies a workload on disk is in `_key`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core
import numpy as np

_UNMAPPED = object()


@dataclass(frozen=True, kw_only=True)
class MapSpec:
    """What the user asked to map, and how: the arguments of `jax.vmap`.

    Attributes:
        fun: the per-example function.
        in_axes, out_axes, axis_name, axis_size, spmd_axis_name: as `jax.vmap` takes them.
    """

    fun: Callable[..., Any]
    in_axes: Any = 0
    out_axes: Any = 0
    axis_name: Any = None
    axis_size: int | None = None
    spmd_axis_name: Any = None

    def vmapped(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `jax.vmap` of a stand-in for `fun`, under the user's axes."""
        return jax.vmap(
            fun,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
            axis_name=self.axis_name,
            axis_size=self.axis_size,
            spmd_axis_name=self.spmd_axis_name,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """A call of a mapped function, described. Leaves are those of `(args, kwargs)`, in order.

    Attributes:
        jaxpr: `fun` for one example; its inputs are the leaves, its consts the closed-over arrays.
        batch_size: rows of the batch.
        in_axes: for each leaf the mapped axis, counted from 0, or None.
        out_axes: for each output the batch axis of the result, counted from 0, or None.
        in_tree: structure of `(args, kwargs)`.
        out_tree: structure of `fun`'s result.
        arguments: shape and dtype of each leaf, batch axis included.
        axis_name, spmd_axis_name: as `jax.vmap` takes them.
    """

    jaxpr: Any
    batch_size: int
    in_axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...]
    in_tree: Any
    out_tree: Any
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    axis_name: Any
    spmd_axis_name: Any

    @property
    def is_mapped(self) -> bool:
        """Whether any argument has a batch axis."""
        return any(axis is not None for axis in self.in_axes)

    @property
    def output_avals(self) -> list[Any]:
        """Abstract values of one example's outputs."""
        return [each.aval for each in self.jaxpr.jaxpr.outvars]

    def serves(self, leaves: list[Any], tree: Any) -> bool:
        """Returns whether a call with these leaves has the shapes and dtypes described here."""
        return tree == self.in_tree and all(
            leaf.shape == argument.shape and leaf.dtype == argument.dtype
            for leaf, argument in zip(leaves, self.arguments, strict=True)
        )


def describe(spec: MapSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Workload:
    """Returns the workload of a call; runs `fun` once, on one abstract example.

    Args:
        spec: the function and its axes.
        args: positional arguments of the call, concrete or traced; only shapes are looked at.
        kwargs: keyword arguments of the call, mapped on axis 0.

    Raises:
        ValueError, TypeError: whatever `jax.vmap` raises for this call, and what `fun` raises.
    """
    traced: dict[str, Any] = {}

    # Under a name of its own every time: JAX would remember the trace of `fun` itself, and with it
    # closed-over values that may have changed since.
    @functools.wraps(spec.fun, updated=())
    def fun(*example: Any, **keywords: Any) -> Any:
        return spec.fun(*example, **keywords)

    @functools.wraps(spec.fun, updated=())
    def spy(*example: Any, **keywords: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(*example, **keywords)
        traced.update(jaxpr=jaxpr, out_tree=jax.tree.structure(shapes))
        # vmap checks `out_axes` against trees and ranks, which a one-element array also has.
        return jax.tree.map(lambda leaf: np.zeros((1,) * len(leaf.shape), bool), shapes)

    def whole(*args: Any, **kwargs: Any) -> Any:
        leaves, traced["in_tree"] = jax.tree.flatten((args, kwargs))
        traced["arguments"] = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        return spec.vmapped(spy)(*args, **kwargs)

    jax.eval_shape(whole, *args, **kwargs)
    arguments = traced["arguments"]
    in_axes = _flat_axes((_as_tuple(spec.in_axes), 0), (args, kwargs), arguments)
    sizes = [
        each.shape[axis] for each, axis in zip(arguments, in_axes, strict=True) if axis is not None
    ]
    jaxpr, out_tree = traced["jaxpr"], traced["out_tree"]
    ranks = [len(each.aval.shape) + 1 for each in jaxpr.jaxpr.outvars]
    outputs = jax.tree.unflatten(out_tree, ranks)
    return Workload(
        jaxpr=jaxpr,
        batch_size=sizes[0] if sizes else spec.axis_size or 0,
        in_axes=in_axes,
        out_axes=tuple(
            axis % rank if axis is not None else None
            for axis, rank in zip(_flat(spec.out_axes, outputs), ranks, strict=True)
        ),
        in_tree=traced["in_tree"],
        out_tree=out_tree,
        arguments=arguments,
        axis_name=spec.axis_name,
        spmd_axis_name=spec.spmd_axis_name,
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation of a jaxpr, those inside loops, branches and calls included."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def _as_tuple(axes: Any) -> Any:
    return tuple(axes) if isinstance(axes, list) else axes


def _flat(axes: Any, tree: Any) -> list[int | None]:
    """Returns one axis per leaf of `tree`, of which `axes` is a prefix that vmap has accepted."""
    marked = jax.tree.map(
        lambda axis: _UNMAPPED if axis is None else axis, axes, is_leaf=lambda axis: axis is None
    )
    return [
        None if axis is _UNMAPPED else axis
        for axis in jax.tree.leaves(jax.tree.broadcast(marked, tree))
    ]


def _flat_axes(
    axes: Any, tree: Any, arguments: tuple[jax.ShapeDtypeStruct, ...]
) -> tuple[int | None, ...]:
    return tuple(
        axis % len(argument.shape) if axis is not None else None
        for axis, argument in zip(_flat(axes, tree), arguments, strict=True)
    )
