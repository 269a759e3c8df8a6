"""Products of the values of one row that can be summed over many rows as they are made.

Which products of a program are summed so is in `_summation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from autobatch._convolution import convolved
from autobatch._reductions import accumulator_dtype

Make = Callable[..., Any]

# Products with places instead of values: what a row adds there.
_ONTO_ZEROS = {"dynamic_update_slice", "scatter-add"}


@dataclass(frozen=True, kw_only=True)
class Term:
    """Something that is summed over rows.

    Attributes:
        aval: of its sum.
        count: how many of a row's values it is made of.
        adders: what adds the term of one row, made from those, to a sum, and what adds those of
            several, stacked along the first axis; None where the value is the term.
    """

    aval: Any
    count: int
    adders: tuple[Make, Make] | None


def is_product(equation: Any, jaxpr: Any, varying: set[Any]) -> bool:
    """Returns whether an equation has a form that sums the results of many rows by itself."""
    atoms = equation.invars
    varies = [not isinstance(each, Literal) and each in varying for each in atoms]
    if not all(is_inexact(var.aval) for var in equation.outvars):
        return False
    match equation.primitive.name:
        case "dot_general":
            is_summable = all(varies) and all(is_inexact(each.aval) for each in atoms)
            return is_summable and _is_better_summed(equation)
        case "conv_general_dilated":
            return all(varies) and all(is_inexact(each.aval) for each in atoms)
        case "scatter-add":
            numbers = equation.params["dimension_numbers"]
            return not numbers.operand_batching_dims and _is_filled_with_zeros(atoms[0], jaxpr)
        case "dynamic_update_slice":
            has_starts = len({each.aval.dtype for each in atoms[2:]}) == 1
            return has_starts and _is_filled_with_zeros(atoms[0], jaxpr)
        case _:
            return False


def _is_better_summed(equation: Any) -> bool:
    """Returns whether a matrix product is smaller or quicker if rows are contracted too.

    It is smaller if it is larger than its operands, and quicker if it is one of two matrices whose
    rows need not be moved next to what is contracted.
    """
    contracting, (batch, _) = equation.params["dimension_numbers"]
    pairs = list(zip(equation.invars, contracting, strict=True))
    are_matrices = all(len(each.aval.shape) > len(axes) for each, axes in pairs)
    is_in_place = all(tuple(axes) == tuple(range(len(axes))) for axes in contracting)
    if are_matrices and is_in_place and not batch:
        return True
    return equation.outvars[0].aval.size > sum(each.aval.size for each in equation.invars)


def is_inexact(aval: Any) -> bool:
    """Returns whether a value is of a real or complex dtype."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def is_zero(atom: Any) -> bool:
    """Returns whether an atom is the number zero."""
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and not atom.val


def _is_filled_with_zeros(atom: Any, jaxpr: Any) -> bool:
    makers = (each for each in jaxpr.eqns if atom in each.outvars)
    return any(
        each.primitive.name == "broadcast_in_dim" and is_zero(each.invars[0]) for each in makers
    )


def product(equation: Any) -> tuple[Term, list[Any]]:
    """Returns a product as a term, and the variables that it is made of."""
    match equation.primitive.name:
        case "dot_general":
            adders = _matrix_product(equation)
        case "conv_general_dilated":
            adders = _convolution(_accumulating(equation))
        case "scatter-add":
            adders = _scatter(equation.params)
        case _:
            adders = _update(is_row=True), _update(is_row=False)
    is_onto_zeros = equation.primitive.name in _ONTO_ZEROS
    values = list(equation.invars[1:] if is_onto_zeros else equation.invars)
    return Term(aval=equation.outvars[0].aval, count=len(values), adders=adders), values


def _accumulating(equation: Any) -> dict[str, Any]:
    """Returns the parameters of a product whose result has the dtype that it is added up in."""
    dtype = equation.outvars[0].aval.dtype
    if accumulator_dtype(dtype) == dtype:
        return equation.params
    return {**equation.params, "preferred_element_type": accumulator_dtype(dtype)}


def _matrix_product(equation: Any) -> tuple[Make, Make]:
    params = _accumulating(equation)
    contracting, batch = (
        tuple(tuple(axis + 1 for axis in axes) for axes in pair)
        for pair in params["dimension_numbers"]
    )
    numbers = tuple((0, *axes) for axes in contracting), batch

    def add_row(total: Any, left: Any, right: Any) -> Any:
        return total + equation.primitive.bind(left, right, **params)

    def add_rows(total: Any, left: Any, right: Any) -> Any:
        changed = {**params, "dimension_numbers": numbers}
        return total + equation.primitive.bind(left, right, **changed)

    return add_row, add_rows


def _convolution(params: dict[str, Any]) -> tuple[Make, Make]:
    """The features of all rows side by side are one row's that has so many of them."""
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]

    def add_row(total: Any, image: Any, kernel: Any) -> Any:
        return total + convolved(image, kernel, **params)

    def add_rows(total: Any, image: Any, kernel: Any) -> Any:
        image = _side_by_side(image, numbers.lhs_spec[1], groups)
        kernel = _side_by_side(kernel, numbers.rhs_spec[1])
        return total + convolved(image, kernel, **params)

    return add_row, add_rows


def _side_by_side(rows: Any, axis: int, groups: int = 1) -> Any:
    """Returns rows, stacked along the first axis, with one of their own axes following another.

    Args:
        rows: along the first axis.
        axis: of a row.
        groups: how many parts of it stay apart: all rows of the first come first.
    """
    shape = rows.shape[1:]
    apart = rows.reshape(
        rows.shape[0], *shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :]
    )
    together = (*shape[:axis], rows.shape[0] * shape[axis], *shape[axis + 1 :])
    return jnp.moveaxis(apart, 0, axis + 1).reshape(together)


def _scatter(params: dict[str, Any]) -> tuple[Make, Make]:
    numbers = params["dimension_numbers"]
    window = tuple(axis + 1 for axis in numbers.update_window_dims)
    of_rows = numbers._replace(update_window_dims=window)

    def add_row(total: Any, indices: Any, updates: Any) -> Any:
        updates = updates.astype(total.dtype)
        return jax.lax.scatter_add(total, indices, updates, numbers, mode=params["mode"])

    def add_rows(total: Any, indices: Any, updates: Any) -> Any:
        updates = updates.astype(total.dtype)
        return jax.lax.scatter_add(total, indices, updates, of_rows, mode=params["mode"])

    return add_row, add_rows


def _update(is_row: bool) -> Make:
    """Returns what adds one slice, or one for every row, where `dynamic_update_slice` puts it."""

    def add(total: Any, update: Any, *starts: Any) -> Any:
        axes = tuple(range(total.ndim))
        window = axes if is_row else tuple(axis + 1 for axis in axes)
        numbers = jax.lax.ScatterDimensionNumbers(window, (), axes)
        indices = jnp.stack(starts, -1)
        if indices.dtype.itemsize < 4:  # which cannot count to the end of large arrays
            indices = indices.astype(jnp.int32)
        update = update.astype(total.dtype)
        return jax.lax.scatter_add(total, indices, update, numbers, mode="clip")

    return add
