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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Literal

from autobatch._reductions import accumulator_dtype
from autobatch._rewriting import inlined, needed, part, variables, varying_variables
from autobatch._rows import sum_of, without_counted
from autobatch._terms import Term, is_inexact, is_product, is_zero, product

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
_CONVERTING = "convert_element_type"
# Linear in each of their operands.
_BILINEAR = {"conv_general_dilated", "dot_general", "mul"}


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
        product(products[var])
        if var in products
        else (Term(aval=var.aval, count=1, adders=None), [var])
        for var in terms
    ]
    outputs = [*others, *(var for _, values in found for var in values)]
    still = [each for each in jaxpr.eqns if varying.isdisjoint(each.outvars)]
    tail = part(jaxpr, needed([*still, *linear], summed), summed)
    tail = inlined(tail, functools.partial(_on_sums, varying=varying, batch_size=batch_size))
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
        elif is_product(equation, jaxpr, varying):
            products[equation.outvars[0]] = equation
            rows.update(operands)
        else:
            linear.insert(0, equation)
            sums.update(operands)
    return linear, products


def _on_sums(equation: Any, varying: set[Any], batch_size: int) -> Any:
    """Returns the jaxpr of what a linear equation does to sums, where that is another; else None.

    What is the same for every row is added once for each. Sums of low precision are in another
    dtype than their terms, and stay in it.
    """
    atoms, params = equation.invars, dict(equation.params)
    varies = [not isinstance(each, Literal) and each in varying for each in atoms]
    is_counted = equation.primitive.name in _ADDING and not all(varies)
    is_low = any(accumulator_dtype(each.aval.dtype) != each.aval.dtype for each in atoms)
    if not any(varies) or not (is_counted or is_low or equation.primitive.name == _CONVERTING):
        return None
    if "new_dtype" in params:
        params["new_dtype"] = accumulator_dtype(params["new_dtype"])
    if is_low and "preferred_element_type" in params:
        params["preferred_element_type"] = None

    def run(*values: Any) -> Any:
        ready = []
        for value, is_sum in zip(values, varies, strict=True):
            if is_low and not is_sum:
                value = value.astype(accumulator_dtype(value.dtype))
            if is_counted and not is_sum:
                value = value * jnp.asarray(batch_size, value.dtype)
            ready.append(value)
        return equation.primitive.bind(*ready, **params)

    avals = [
        each.aval.update(dtype=accumulator_dtype(each.aval.dtype)) if is_sum else each.aval
        for each, is_sum in zip(atoms, varies, strict=True)
    ]
    return jax.make_jaxpr(run)(*avals).jaxpr


def _made_of_products(jaxpr: Any, varying: set[Any]) -> set[Any]:
    """Returns the variables that are products of rows, or linear in such."""
    found: set[Any] = set()
    for equation in jaxpr.eqns:
        operands = [var for var in variables(equation.invars) if var in varying]
        if not all(is_inexact(var.aval) for var in equation.outvars):
            continue
        leads = not found.isdisjoint(operands) and _is_linear(equation, varying)
        if leads or is_product(equation, jaxpr, varying):
            found.update(equation.outvars)
    return found


def _is_linear(equation: Any, varying: set[Any]) -> bool:
    """Returns whether a sum over rows may be taken before an equation instead of after it."""
    varies = [not isinstance(each, Literal) and each in varying for each in equation.invars]
    if not all(is_inexact(var.aval) for var in variables(equation.invars) if var in varying):
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
        case name if name == _CONVERTING:
            dtypes = equation.invars[0].aval.dtype, equation.params["new_dtype"]
            return all(jnp.issubdtype(each, jnp.floating) for each in dtypes)
        case "pad":
            return varies == [True, False] and is_zero(equation.invars[1])
        case _:
            return False


def _in_order(jaxpr: Any) -> list[Any]:
    return [*jaxpr.invars, *(var for equation in jaxpr.eqns for var in equation.outvars)]
