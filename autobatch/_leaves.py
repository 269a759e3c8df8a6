"""A call taken apart: the arrays, which JAX traces, and the rest, which is static.

Unmapped arguments of `jax.vmap` may be any object. To `jax.jit` they are static arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import numpy as np

_SCALARS = (bool, int, float, complex, np.ndarray, np.generic)
_LIKE_ARRAYS = (jax.Ref, jax.ShapeDtypeStruct)


@dataclass(frozen=True, kw_only=True)
class Statics:
    """What of a call is no array. Equal for calls that may share a trace.

    Attributes:
        tree: structure of `(args, kwargs)`.
        values: position among the leaves, type and value of each static leaf. The type is there
            because `1 == True == 1.0`.
    """

    tree: Any
    values: tuple[tuple[int, type, Any], ...]

    def rebuilt(self, arrays: Sequence[Any], tree: Any = None) -> tuple[tuple[Any, ...], Any]:
        """Returns `(args, kwargs)` with these arrays; `tree` may hold them in other containers."""
        remaining, statics = iter(arrays), {place: value for place, _, value in self.values}
        tree = self.tree if tree is None else tree
        return jax.tree.unflatten(
            tree,
            [
                statics[position] if position in statics else next(remaining)
                for position in range(tree.num_leaves)
            ],
        )


def split(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> tuple[list[Any], Statics]:
    """Returns the arrays of a call, in the order of its leaves, and what else it holds.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        static_argnums: positional arguments of which every leaf is static.
        static_argnames: keyword arguments of which every leaf is static.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    arrays, values = [], []
    for position, (path, leaf) in enumerate(paths):
        named = static_argnames if path[0].idx else static_argnums
        if is_array(leaf) and not (named and _place(path[1]) in named):
            arrays.append(leaf)
        else:
            values.append((position, type(leaf), leaf))
    return arrays, Statics(tree=tree, values=tuple(values))


def split_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Statics]:
    """Returns the same for a call inside `jax.jit`, where exactly the arrays are traced."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]
    values = [
        (position, type(leaf), leaf)
        for position, leaf in enumerate(leaves)
        if not isinstance(leaf, jax.core.Tracer)
    ]
    return arrays, Statics(tree=tree, values=tuple(values))


def is_array(leaf: Any) -> bool:
    """Returns whether JAX takes `leaf` for an array: arrays, tracers and Python numbers are."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm"
    return isinstance(leaf, (jax.Array, *_SCALARS, *_LIKE_ARRAYS)) or hasattr(leaf, "__jax_array__")


def needs_vmap(tree: Any) -> bool:
    """Returns whether a tree holds what only `jax.vmap` itself knows how to slice.

    Those are sparse arrays and mutable references.
    """
    nodes = jax.tree.leaves(tree, is_leaf=_is_sparse)
    return any(_is_sparse(node) or _is_reference(node) for node in nodes)


def _is_sparse(node: Any) -> bool:
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(node, sparse.JAXSparse)


def _is_reference(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer | jax.Ref) and hasattr(jax.typeof(leaf), "inner_aval")


@dataclass(frozen=True, kw_only=True)
class Form:
    """How calls reach jit: which whole arguments are static, or that leaves inside some are.

    Attributes:
        static_argnums: positional arguments that are passed to jit as static.
        static_argnames: keyword arguments that are passed to jit as static.
        is_packed: whether objects lie inside trees of arrays, which jit cannot be told; then a
            call is taken apart before it.
    """

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    is_packed: bool = False


def form_of(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
) -> Form:
    """Returns the form of a call.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        static_argnums: positional arguments that the user declared static.
        static_argnames: keyword arguments that the user declared static.

    Raises:
        ValueError: an object that would be static is not hashable; the message names it.
    """
    numbers, names, is_packed = set(static_argnums), set(static_argnames), False
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        place = _place(path[1])
        declared: set[Any] = names if path[0].idx else numbers
        if place in declared or is_array(leaf):
            continue
        try:
            hash(leaf)
        except TypeError:
            where = jax.tree_util.keystr(path[1:])
            raise ValueError(
                f"argument {where} is no array and would be static, but {type(leaf).__name__} is "
                f"not hashable; pass arrays, or an object with __hash__ and __eq__"
            ) from None
        if len(path) == 2:
            declared.add(place)
        else:
            is_packed = True
    return Form(
        static_argnums=tuple(sorted(each for each in numbers if each < len(args))),
        static_argnames=tuple(sorted(each for each in names if each in kwargs)),
        is_packed=is_packed,
    )


def _place(key: Any) -> Any:
    """Returns the index or name of the argument that a path begins with."""
    return getattr(key, "idx", getattr(key, "key", None))
