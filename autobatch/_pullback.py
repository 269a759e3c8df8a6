"""The derivative of a mapped function as a workload of its own: its value and its pullback.

Its operands are those of the program of one row, closed-over arrays first, and no others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autobatch._key import program_digest
from autobatch._leaves import split
from autobatch._reversible import reversible
from autobatch._strategies import VMAP, Strategy
from autobatch._workload import RowProgram, Workload, equations, shape_of, without_unused


def differentiated(
    row: RowProgram, arguments: Sequence[jax.ShapeDtypeStruct], moving: Sequence[int]
) -> Workload:
    """Returns the workload of a value and its pullback.

    Args:
        row: the program of one example, which uses all of its operands.
        arguments: shape and dtype of each operand, batch axis included.
        moving: positions of the operands that are differentiated.
    """
    places = tuple(moving)
    return Workload(
        row=row,
        consts=(),
        arguments=tuple(arguments),
        in_axes=row.in_axes,
        batch_size=row.batch_size,
        statics=split(tuple(arguments), {})[1],
        out_tree=None,
        moving=places,
        rules=_rules(row, arguments, places),
    )


def _rules(
    row: RowProgram, arguments: Sequence[jax.ShapeDtypeStruct], moving: Sequence[int]
) -> str | None:
    """Returns a digest of the derivative, where the program does not say what it will be."""
    if all("custom_" not in each.primitive.name for each in equations(row.jaxpr)):
        return None

    def run(*operands: Any) -> list[Any]:
        return value_and_pullback(VMAP, row, operands, moving)

    try:
        return program_digest(jax.make_jaxpr(run)(*arguments))
    except Exception:  # there is no reverse derivative, which a caller may not want
        return None


def derivative_of(
    workload: Workload, arrays: Sequence[Any], moving: Collection[int]
) -> tuple[Workload, list[Any]]:
    """Returns the workload of a call's value and pullback, and its operands.

    Args:
        workload: the described call, with the program of a row.
        arrays: its arrays.
        moving: positions of what is differentiated, as `moving_operands` counts them.
    """
    assert workload.row is not None
    row, kept = without_unused(workload.row)
    operands = [*workload.consts, *arrays]
    shapes = [*map(shape_of, workload.consts), *workload.arguments]
    places = [place for place, at in enumerate(kept) if at in moving]
    return differentiated(row, [shapes[at] for at in kept], places), [operands[at] for at in kept]


def moving_operands(
    workload: Workload, args: tuple[Any, ...], argnums: Sequence[int], *, first: int = 0
) -> frozenset[int]:
    """Returns the positions of what is differentiated among the operands of a call.

    Those are the closed-over arrays, then the arrays of its arguments.

    Args:
        workload: the described call.
        args: its positional arguments.
        argnums: those that are differentiated, counted as `jax.grad` counts them; none for the
            closed-over arrays.
        first: the argument that counting starts from: of a bound method, that after the object.

    Raises:
        ValueError: there is no such argument.
        TypeError: one holds no arrays, or such that have no derivative.
    """
    closed_over = len(workload.consts)
    if not argnums:
        consts = enumerate(workload.consts)
        return frozenset(at for at, each in consts if jnp.issubdtype(each.dtype, jnp.inexact))
    static = {position for position, _, _ in workload.statics.values}
    places = [each for each in range(workload.statics.tree.num_leaves) if each not in static]
    counts = [len(jax.tree.leaves(each)) for each in args]
    numbers = range(first, len(args))
    found: set[int] = set()
    for number in argnums:
        if not -len(numbers) <= number < len(numbers):
            raise ValueError(f"argnums has {number}, and the call has {len(numbers)} arguments")
        start = sum(counts[: numbers[number]])
        span = range(start, start + counts[numbers[number]])
        dtypes = {
            at: workload.arguments[at].dtype for at, place in enumerate(places) if place in span
        }
        own = [at for at, dtype in dtypes.items() if jnp.issubdtype(dtype, jnp.inexact)]
        if not own:
            what = ", ".join(sorted({str(each) for each in dtypes.values()})) or "no arrays"
            raise TypeError(
                f"what is differentiated must be real or complex, and argument {number} holds "
                f"{what}; argnums names another"
            )
        found.update(own)
    return frozenset(closed_over + at for at in found)


def value_and_pullback(
    strategy: Strategy, row: RowProgram, operands: Sequence[Any], moving: Sequence[int]
) -> list[Any]:
    """Returns the outputs, and the cotangents of the operands that are differentiated.

    The outputs' cotangents are ones, as they are of a sum.

    Args:
        strategy: how to map.
        row: the program of one example, and the axes.
        operands: its operands, batch axes included.
        moving: positions of the operands that are differentiated.

    Raises:
        ValueError, TypeError: what JAX raises for a program without a reverse derivative.
    """

    def of_moving(*values: Any) -> list[Any]:
        return reversible(strategy, row, replaced(operands, moving, values), moving)

    outputs, pull = jax.vjp(of_moving, *(operands[at] for at in moving))
    return [*outputs, *pull([_ones(each) for each in outputs])]


def replaced(operands: Sequence[Any], moving: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Returns the operands with other values at these positions."""
    changed = dict(zip(moving, values, strict=True))
    return [changed.get(at, each) for at, each in enumerate(operands)]


def _ones(output: Any) -> Any:
    if jnp.issubdtype(output.dtype, jnp.inexact):
        return jnp.ones(output.shape, output.dtype)
    return np.zeros(output.shape, jax.dtypes.float0)
