"""An upper bound of the memory that a jaxpr needs, from the sizes of values alive at once.

Pure: nothing is compiled or run, and no device is asked. Device limits, XLA's own plan and
measured growth are in `_memory`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

# What an equation holds while it runs, beyond operands and results and in multiples of both.
# Library calls allocate outside XLA's plan (packed panels of a matrix product, unrolled patches
# of a convolution, the buffer that a sort or a factorisation works in), and some primitives are
# whole programs once they are lowered (bit generators, series, searches). The numbers are what
# XLA's plans on CPU were seen to need, rounded up.
_WORKSPACE: dict[str, int] = {
    **dict.fromkeys(("dot_general", "ragged_dot_general", "fft"), 1),
    **dict.fromkeys(("conv_general_dilated", "loop_convolution"), 1),
    **dict.fromkeys(("sort", "top_k", "approx_top_k", "reduce_window"), 1),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), 1),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"), 1),
    **dict.fromkeys(("cholesky", "cholesky_update", "lu", "lu_pivots_to_permutation"), 1),
    "eig": 2,
    **dict.fromkeys(("eigh", "svd", "schur", "hessenberg", "householder_product"), 1),
    **dict.fromkeys(("qr", "geqrf", "geqp3", "ormqr", "triangular_solve"), 1),
    **dict.fromkeys(("tridiagonal", "tridiagonal_solve"), 1),
    **dict.fromkeys(("lgamma", "digamma", "polygamma", "zeta"), 1),
    **dict.fromkeys(("ffi_call", "pure_callback", "io_callback"), 1),
    "call_hi_primitive": 4,  # a program that its equation does not show
    "select_and_scatter_add": 3,
    "select_and_gather_add": 3,
    **dict.fromkeys(("random_bits", "random_split", "threefry2x32", "rng_bit_generator"), 4),
    **dict.fromkeys(("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta"), 16),
    **dict.fromkeys(("random_gamma", "random_gamma_grad"), 32),
}


def live_bytes(jaxpr: Any) -> int:
    """Returns an upper bound of the bytes that evaluating `jaxpr` holds at once.

    Arguments, constants and results count throughout: the first two live with the caller, and
    XLA allocates results before it starts. Temporaries count from the equation that makes them
    to their last use. Fusion is not foreseen, so the bound may be many times too high.

    Args:
        jaxpr: the program, closed or not, already batched.

    >>> import jax, jax.numpy as jnp
    >>> live_bytes(jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(jnp.ones(1000)))
    12000
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    results = frozenset(_variables(jaxpr.outvars))
    return _size(jaxpr.invars) + _size(jaxpr.outvars) + _beyond_inputs(jaxpr, results)


def tree_bytes(leaves: Iterable[Any]) -> int:
    """Returns the bytes of arrays, or of anything else with a shape and a dtype."""
    return sum(aval_bytes(each) for each in leaves)


def aval_bytes(aval: Any, least_itemsize: int = 0) -> int:
    """Returns the bytes of one value of this shape and dtype; 0 for tokens and the like.

    Args:
        aval: an abstract value, a `jax.ShapeDtypeStruct` or an array.
        least_itemsize: bytes that an element takes at least.

    >>> import jax, jax.numpy as jnp
    >>> aval_bytes(jax.ShapeDtypeStruct((3, 4), jnp.bfloat16))
    24
    """
    aval = getattr(aval, "inner_aval", aval)  # what a mutable reference refers to
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    # An item of a key dtype is all the words of a key; one of numpy's float0 has 0 bytes.
    return math.prod(shape) * max(least_itemsize, dtype.itemsize)


def _beyond_inputs(jaxpr: Any, elsewhere: frozenset[Any] = frozenset()) -> int:
    """Returns the most bytes that evaluating `jaxpr` holds at once, less its inputs.

    Args:
        jaxpr: an open jaxpr.
        elsewhere: variables that somebody else counts.
    """
    last_use = _last_use(jaxpr)
    alive = peak = _size(jaxpr.constvars) + _literal_bytes(jaxpr)
    made: dict[Any, int] = {}  # values that can be freed: no inputs, no constants
    for index, eqn in enumerate(jaxpr.eqns):
        counted = _size(each for each in eqn.outvars if each in elsewhere)
        peak = max(peak, alive + _equation_bytes(eqn) - counted)
        for var in eqn.outvars:
            if var in last_use and var not in elsewhere:
                made[var] = aval_bytes(var.aval)
                alive += made[var]
        for var in _variables(eqn.invars):
            if last_use[var] == index:
                alive -= made.pop(var, 0)
    return peak


def _last_use(jaxpr: Any) -> dict[Any, int]:
    """Returns the index of the last equation that reads each variable; results are never last."""
    last_use: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last_use.update(dict.fromkeys(_variables(eqn.invars), index))
    last_use.update(dict.fromkeys(_variables(jaxpr.outvars), len(jaxpr.eqns)))
    return last_use


def _equation_bytes(eqn: Any) -> int:
    """Returns the most bytes that one equation holds at once, less its operands."""
    results = _size(eqn.outvars)
    multiple = _WORKSPACE.get(eqn.primitive.name, 0)
    if multiple:
        # Half precision is computed in single precision: its workspace has four bytes an element.
        operands_and_results = (*eqn.invars, *eqn.outvars)
        results += multiple * sum(aval_bytes(each.aval, 4) for each in operands_and_results)
    bodies = tuple(_subjaxprs(eqn))
    inner = max((_beyond_inputs(each) for each in bodies), default=0)
    if eqn.primitive.name in ("scan", "while") and any(_has_workspace(each) for each in bodies):
        # Steps run on changing threads, and the allocator keeps for each what it freed.
        inner *= 2
    match eqn.primitive.name:
        case "scan":
            # A step reads slices of the stacked operands and makes a carry beside the old one.
            return results + inner + _slice_bytes(eqn, bodies[0])
        case "while":
            return results + inner
        case _:  # a call, whose results are those of its body, or no bodies at all
            return max(results, inner)


def _slice_bytes(eqn: Any, body: Any) -> int:
    """Returns the bytes of the slices of its stacked operands that one step of a scan reads."""
    pairs = zip(eqn.invars, body.invars, strict=True)
    return _size(inner for outer, inner in pairs if outer.aval.shape != inner.aval.shape)


def _has_workspace(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in _WORKSPACE or any(map(_has_workspace, _subjaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _subjaxprs(eqn: Any) -> Iterator[Any]:
    for param in eqn.params.values():
        for each in param if isinstance(param, tuple | list) else (param,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each


def _literal_bytes(jaxpr: Any) -> int:
    """Returns the bytes of arrays that stand in the equations as literals, each counted once."""
    literals = (each for eqn in jaxpr.eqns for each in eqn.invars if hasattr(each, "val"))
    arrays = {id(each.val): aval_bytes(each.aval) for each in literals if each.aval.shape}
    return sum(arrays.values())


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {each for each in atoms if not hasattr(each, "val")}  # a literal has a value


def _size(atoms: Iterable[Any]) -> int:
    return tree_bytes(each.aval for each in atoms)
