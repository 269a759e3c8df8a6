"""Convolutions in the one form that XLA runs fast inside loops on CPUs.

It has one that calls a library, which it brings every convolution into, except inside loops, where
the others become plain loops over numbers: the gradients of a convolution ran 30 to 90 times slower
in a `jax.lax.scan` than outside. So in loops they are written in that form from the beginning.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import conv_general_dilated_p

from autobatch._rewriting import replaced

_NAME = "conv_general_dilated"


def canonical(jaxpr: Any) -> Any:
    """Returns the program with its convolutions in the form that CPUs run fast inside loops.

    Args:
        jaxpr: an open jaxpr without constants.
    """
    if jax.default_backend() != "cpu":
        return jaxpr

    def inner(equation: Any) -> Any:
        if equation.primitive.name == _NAME and not _is_canonical(equation.params):
            run = functools.partial(convolved, **equation.params)
            return jax.make_jaxpr(run)(*(each.aval for each in equation.invars)).jaxpr
        return None

    return replaced(jaxpr, inner)


def convolved(image: Any, kernel: Any, **params: Any) -> Any:
    """Returns `conv_general_dilated` of these parameters.

    Args:
        image: the left operand.
        kernel: the right one.
        params: those of the primitive.
    """
    numbers = params["dimension_numbers"]
    if _is_canonical(params) or jax.default_backend() != "cpu":
        return conv_general_dilated_p.bind(image, kernel, **params)
    last = image.ndim - 1
    batch, feature, *space = numbers.lhs_spec
    image = jnp.transpose(image, (batch, *space, feature))
    features, inputs, *space = numbers.rhs_spec
    kernel = jnp.transpose(kernel, (*space, inputs, features))
    result = conv_general_dilated_p.bind(
        image, kernel, **{**params, "dimension_numbers": _numbers(last)}
    )
    batch, feature, *space = numbers.out_spec
    return jnp.transpose(result, np.argsort((batch, *space, feature)).tolist())


def _numbers(last: int) -> Any:
    """Returns the dimensions as they lie: batch, space, features; and space, inputs, features."""
    image = (0, last, *range(1, last))
    return jax.lax.ConvDimensionNumbers(image, (last, last - 1, *range(last - 1)), image)


def _is_canonical(params: dict[str, Any]) -> bool:
    numbers = params["dimension_numbers"]
    return numbers == _numbers(len(numbers.lhs_spec) - 1)
