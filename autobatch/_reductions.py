"""`SUM` and `MEAN`: results that are reduced over the batch instead of stacked along an axis.

What is here knows one value at a time; in which order rows come, and which count, is in `_mapping`.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p


class Reduction(enum.Enum):
    """A leaf of `out_axes` that reduces its output over the batch.

    Floats of less than 32 bits are added in float32 and cast back; integers are added in their own
    type, and have no mean.
    """

    SUM = "sum"
    MEAN = "mean"

    def __repr__(self) -> str:
        return f"autobatch.{self.name}"


SUM, MEAN = Reduction.SUM, Reduction.MEAN

Axis = int | Reduction | None
"""Where the rows of an output go: along an axis, into a reduction, or nowhere."""


def check_reduction(reduction: Reduction, dtype: Any, batch_size: Any) -> None:
    """Raises where an output cannot be reduced.

    Raises:
        TypeError: booleans and keys have no sum, and integers no mean.
        ValueError: no rows have no mean.
    """
    is_number = jnp.issubdtype(dtype, jnp.number)
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    if not (is_inexact if reduction is MEAN else is_number):
        raise TypeError(
            f"out_axes has {reduction!r} for an output of dtype {dtype}, which has no "
            f"{reduction.value}; cast it inside the function, or give it an axis"
        )
    if reduction is MEAN and isinstance(batch_size, int) and batch_size == 0:
        raise ValueError("out_axes has autobatch.MEAN, and a batch of 0 rows has no mean")


def accumulator_dtype(dtype: Any) -> Any:
    """Returns the dtype in which values of `dtype` are added up."""
    is_low = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_low else dtype


def added(values: Any, axis: int = 0) -> Any:
    """Returns the sum of values along an axis, in their accumulator's dtype."""
    return jnp.sum(values, axis, dtype=accumulator_dtype(values.dtype))


def finished(total: Any, reduction: Reduction, batch_size: Any, aval: Any) -> Any:
    """Returns the reduction of all rows from their sum, in the dtype of a row, weak if that is.

    Args:
        total: the sum, in the accumulator's dtype.
        reduction: which one.
        batch_size: rows of the batch.
        aval: of one row; the batch axis does not matter.
    """
    if reduction is MEAN and jnp.iscomplexobj(total):
        rows = jnp.asarray(batch_size, total.real.dtype)  # a complex divisor would spoil infinities
        total = jax.lax.complex(total.real / rows, total.imag / rows)
    elif reduction is MEAN:
        total = total / jnp.asarray(batch_size, total.dtype)
    return weak_as(jax.lax.convert_element_type(total, aval.dtype), aval)


def weak_as(value: Any, aval: Any) -> Any:
    """Returns `value` with the weak type of `aval`, which loops and buffers do not keep."""
    if not getattr(aval, "weak_type", False):
        return value
    return convert_element_type_p.bind(value, new_dtype=value.dtype, weak_type=True, sharding=None)


def stacked(axes: Any) -> Any:
    """Returns `out_axes` with axis 0 for every reduction, as `jax.vmap` takes them."""
    return jax.tree.map(
        lambda axis: 0 if isinstance(axis, Reduction) else axis, axes, is_leaf=lambda x: x is None
    )


def has_reduction(axes: Any) -> bool:
    """Returns whether any leaf of `out_axes` is a reduction."""
    return any(isinstance(axis, Reduction) for axis in jax.tree.leaves(axes))
