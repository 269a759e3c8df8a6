"""Sums over rows that are taken before the rows' terms are made: what `SUM` and `MEAN` add up.

The gradient of one row with respect to a matrix is an outer product; of many rows, their sum is one
matrix product, and the outer products need not exist. So the program of a row is cut before its
last products: the rows of their operands are collected, contracted over rows and all, and what
follows, being linear, is applied to the sums, once after the loop. That is what the derivative of a
sum looks like, found again in the program of one row. XLA does it too, for matrix products that
nothing stands between and the sum; here it holds for convolutions and scatters as well, and memory
is bounded without the compiler's help.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from autobatch._convolution import convolved
from autobatch._reductions import accumulator_dtype
from autobatch._rewriting import inlined, needed, part, variables, varying_variables
from autobatch._rows import sum_of, without_counted

Make = Callable[..., Any]

# Linear in all of their operands together; what is the same for every row counts once for each.
_ADDING = {"add", "add_any", "concatenate", "sub"}
# Linear in their one operand.
_MOVING = {
    "broadcast_in_dim",
    "copy",
    "expand_dims",
    "neg",
    "reduce_sum",
    "reshape",
    "rev",
    "slice",
    "squeeze",
    "transpose",
}
# Linear in each of their operands.
_BILINEAR = {"conv_general_dilated", "dot_general", "mul"}
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


@dataclass(frozen=True, kw_only=True)
class Summation:
    """A program of one row, cut where rows can be summed.

    Attributes:
        head: what is evaluated for every row: the outputs that are not summed, then the values that
            terms are made of.
        terms: what is summed.
        tail: makes the summed outputs from the terms' sums and from inputs that are not mapped.
        shared: positions of those inputs.
        others: how many outputs are not summed.
    """

    head: Any
    terms: tuple[Term, ...]
    tail: Any
    shared: tuple[int, ...]
    others: int

    def zeros(self) -> list[Any]:
        """Returns the sums of no rows."""
        return [
            jnp.zeros(each.aval.shape, accumulator_dtype(each.aval.dtype)) for each in self.terms
        ]

    def parts(self, results: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        """Returns the results of `head`: those that are not summed, and those of each term."""
        remaining = iter(results[self.others :])
        values = [[next(remaining) for _ in range(each.count)] for each in self.terms]
        return list(results[: self.others]), values

    def added(
        self,
        sums: Sequence[Any],
        values: Sequence[Sequence[Any]],
        counted: Any = None,
        *,
        is_row: bool = False,
    ) -> list[Any]:
        """Returns the sums after a step.

        Args:
            sums: those before it.
            values: what terms are made of, of one row, or of several along the first axis.
            counted: how many of the first rows an earlier step has counted; None where none is.
            is_row: whether it is one row.
        """

        def after(term: Term, total: Any, of_rows: Sequence[Any]) -> Any:
            if term.adders is None:
                (value,) = of_rows
                return total + sum_of(value, counted, is_row)
            add_row, add_rows = term.adders
            if is_row:
                return add_row(total, *of_rows)
            return add_rows(total, *(without_counted(each, counted) for each in of_rows))

        return list(map(after, self.terms, sums, values))

    def finished(self, sums: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Returns the summed outputs, given the sums over all rows and the program's inputs."""
        return jax.core.eval_jaxpr(self.tail, (), *sums, *(inputs[at] for at in self.shared))


def summation(
    jaxpr: Any, is_mapped: Sequence[bool], is_summed: Sequence[bool], batch_size: int
) -> Summation:
    """Returns the program of one row, cut where rows can be summed.

    Args:
        jaxpr: the program, without constants, of which every summed output varies from row to row.
        is_mapped: for each input, whether it does.
        is_summed: for each output, whether it is summed over rows.
        batch_size: how many rows there are.
    """
    varying = varying_variables(jaxpr, is_mapped)
    pairs = list(zip(jaxpr.outvars, is_summed, strict=True))
    summed = [var for var, is_sum in pairs if is_sum]
    others = [var for var, is_sum in pairs if not is_sum]
    linear, products = _put_off(jaxpr, varying, summed, others)

    made = {var for each in linear for var in each.outvars}
    read = {*variables(var for each in linear for var in each.invars), *summed}
    terms = [var for var in _in_order(jaxpr) if var in varying and var in read - made]
    found = [
        _product(products[var])
        if var in products
        else (Term(aval=var.aval, count=1, adders=None), [var])
        for var in terms
    ]
    outputs = [*others, *(var for _, values in found for var in values)]
    still = [each for each in jaxpr.eqns if varying.isdisjoint(each.outvars)]
    tail = part(jaxpr, needed([*still, *linear], summed), summed)
    tail = inlined(tail, functools.partial(_for_all_rows, varying=varying, batch_size=batch_size))
    shared = [var for var in tail.invars if var not in terms]
    return Summation(
        head=jaxpr.replace(eqns=needed(jaxpr.eqns, outputs), outvars=outputs),
        terms=tuple(term for term, _ in found),
        tail=tail.replace(invars=[*terms, *shared]),
        shared=tuple(jaxpr.invars.index(var) for var in shared),
        others=len(others),
    )


def _put_off(
    jaxpr: Any, varying: set[Any], summed: Sequence[Any], others: Sequence[Any]
) -> tuple[list[Any], dict[Any, Any]]:
    """Returns what is done with sums, not with rows: linear equations, and last products.

    The former in order, the latter by their results. What leads to no product stays with the rows,
    since a sum of it may be larger than what is made from it; and so does whatever else needs it.
    """
    worth = _made_of_products(jaxpr, varying)
    rows, sums = set(variables(others)), set(summed)
    linear: list[Any] = []
    products: dict[Any, Any] = {}
    for equation in reversed(jaxpr.eqns):
        own = {var for var in equation.outvars if var in varying}
        operands = [var for var in variables(equation.invars) if var in varying]
        is_row = bool(equation.effects) or not own.isdisjoint(rows)
        if not is_row and own.isdisjoint(sums):
            continue
        if is_row or own.isdisjoint(worth):
            rows.update(operands)
        elif _is_product(equation, jaxpr, varying):
            products[equation.outvars[0]] = equation
            rows.update(operands)
        else:
            linear.insert(0, equation)
            sums.update(operands)
    return linear, products


def _for_all_rows(equation: Any, varying: set[Any], batch_size: int) -> Any:
    """Returns the jaxpr of a linear equation that adds what does not vary, or None for others."""
    atoms = equation.invars
    varies = [not isinstance(each, Literal) and each in varying for each in atoms]
    if equation.primitive.name not in _ADDING or all(varies) or not any(varies):
        return None

    def run(*values: Any) -> Any:
        counted = [
            value if is_sum else value * jnp.asarray(batch_size, value.dtype)
            for value, is_sum in zip(values, varies, strict=True)
        ]
        return equation.primitive.bind(*counted, **equation.params)

    return jax.make_jaxpr(run)(*(each.aval for each in atoms)).jaxpr


def _made_of_products(jaxpr: Any, varying: set[Any]) -> set[Any]:
    """Returns the variables that are products of rows, or linear in such."""
    found: set[Any] = set()
    for equation in jaxpr.eqns:
        operands = [var for var in variables(equation.invars) if var in varying]
        if not all(_is_wide(var.aval) for var in equation.outvars):
            continue
        leads = not found.isdisjoint(operands) and _is_linear(equation, varying)
        if leads or _is_product(equation, jaxpr, varying):
            found.update(equation.outvars)
    return found


def _is_wide(aval: Any) -> bool:
    """Returns whether sums of such values are of their own dtype, and rounded as they are."""
    dtype = getattr(aval, "dtype", None)
    is_inexact = dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
    return is_inexact and accumulator_dtype(dtype) == dtype


def _is_linear(equation: Any, varying: set[Any]) -> bool:
    """Returns whether a sum over rows may be taken before an equation instead of after it."""
    varies = [not isinstance(each, Literal) and each in varying for each in equation.invars]
    if not all(_is_wide(var.aval) for var in variables(equation.invars) if var in varying):
        return False
    match equation.primitive.name:
        case name if name in _MOVING:
            return varies[0] and sum(varies) == 1
        case name if name in _ADDING:
            return any(varies)
        case name if name in _BILINEAR:
            return sum(varies) == 1
        case "div":
            return varies == [True, False]
        case "pad":
            return varies == [True, False] and _is_zero(equation.invars[1])
        case _:
            return False


def _is_product(equation: Any, jaxpr: Any, varying: set[Any]) -> bool:
    """Returns whether an equation has a form that sums the results of many rows by itself."""
    atoms = equation.invars
    varies = [not isinstance(each, Literal) and each in varying for each in atoms]
    if not all(_is_wide(var.aval) for var in equation.outvars):
        return False
    match equation.primitive.name:
        case "dot_general":
            is_exact = all(varies) and all(_is_wide(each.aval) for each in atoms)
            return is_exact and _is_better_summed(equation)
        case "conv_general_dilated":
            return all(varies)
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

    It is smaller if it is larger than its operands, and quicker if their rows need not be moved
    next to what is contracted.
    """
    contracting, (batch, _) = equation.params["dimension_numbers"]
    if not batch and all(tuple(axes) == tuple(range(len(axes))) for axes in contracting):
        return True
    return equation.outvars[0].aval.size > sum(each.aval.size for each in equation.invars)


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and not atom.val


def _is_filled_with_zeros(atom: Any, jaxpr: Any) -> bool:
    makers = (each for each in jaxpr.eqns if atom in each.outvars)
    return any(
        each.primitive.name == "broadcast_in_dim" and _is_zero(each.invars[0]) for each in makers
    )


def _product(equation: Any) -> tuple[Term, list[Any]]:
    """Returns a product as a term, and the variables that it is made of."""
    match equation.primitive.name:
        case "dot_general":
            adders = _matrix_product(equation)
        case "conv_general_dilated":
            adders = _convolution(equation.params)
        case "scatter-add":
            adders = _scatter(equation.params)
        case _:
            adders = _update(is_row=True), _update(is_row=False)
    is_onto_zeros = equation.primitive.name in _ONTO_ZEROS
    values = list(equation.invars[1:] if is_onto_zeros else equation.invars)
    return Term(aval=equation.outvars[0].aval, count=len(values), adders=adders), values


def _matrix_product(equation: Any) -> tuple[Make, Make]:
    params = equation.params
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
        return jax.lax.scatter_add(total, indices, updates, numbers, mode=params["mode"])

    def add_rows(total: Any, indices: Any, updates: Any) -> Any:
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
        return jax.lax.scatter_add(total, indices, update, numbers, mode="clip")

    return add


def _in_order(jaxpr: Any) -> list[Any]:
    return [*jaxpr.invars, *(var for equation in jaxpr.eqns for var in equation.outvars)]
