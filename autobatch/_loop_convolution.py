"""A convolution whose derivatives, too, are in the form that XLA runs fast inside loops on CPUs.

`_convolution` says why. A loop that is differentiated holds the convolutions that JAX derives from
its own, in other forms. So there they are a primitive, by whose rules convolutions lead to such
convolutions only. Every rule is JAX's own, traced, with its convolutions replaced.
Source: JAX's "JAX primitives"; the parameters are those of `conv_general_dilated`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.extend.core import Primitive
from jax.extend.core.primitives import conv_general_dilated_p
from jax.interpreters import ad, batching, mlir

from autobatch._convolution import convolved
from autobatch._devices import is_inside_shard_map
from autobatch._rewriting import replaced

loop_convolution_p = Primitive("loop_convolution")


def for_loops(jaxpr: Any) -> Any:
    """Returns the program with convolutions that stay fast inside loops, however differentiated.

    Args:
        jaxpr: an open jaxpr without constants.
    """
    if jax.default_backend() != "cpu" or is_inside_shard_map():
        return jaxpr

    def inner(equation: Any) -> Any:
        if equation.primitive is conv_general_dilated_p:
            bind = functools.partial(loop_convolution_p.bind, **equation.params)
            return jax.make_jaxpr(bind)(*(each.aval for each in equation.invars)).jaxpr
        return None

    return replaced(jaxpr, inner)


def _replaced(fun: Callable[..., Any], *args: Any) -> Any:
    """Returns what a function returns, whose convolutions are such as stay fast inside loops."""
    closed = jax.make_jaxpr(fun)(*args)
    jaxpr = closed.jaxpr
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    (result,) = jax.core.eval_jaxpr(for_loops(jaxpr), (), *closed.consts, *args)
    return result


def _plain(params: dict[str, Any]) -> Callable[..., Any]:
    return functools.partial(conv_general_dilated_p.bind, **params)


def _cotangent_of_image(cotangent: Any, image: Any, kernel: Any, **params: Any) -> Any:
    def transposed(cotangent: Any, kernel: Any) -> Any:
        of_image = lambda image: _plain(params)(image, kernel)  # noqa: E731
        return jax.linear_transpose(of_image, image.aval)(cotangent)[0]

    return _replaced(transposed, cotangent, kernel)


def _cotangent_of_kernel(cotangent: Any, image: Any, kernel: Any, **params: Any) -> Any:
    def transposed(cotangent: Any, image: Any) -> Any:
        of_kernel = lambda kernel: _plain(params)(image, kernel)  # noqa: E731
        return jax.linear_transpose(of_kernel, kernel.aval)(cotangent)[0]

    return _replaced(transposed, cotangent, image)


def _batched(args: Sequence[Any], axes: Sequence[int | None], **params: Any) -> tuple[Any, int]:
    return _replaced(jax.vmap(_plain(params), tuple(axes)), *args), 0


def _abstract(image: Any, kernel: Any, **params: Any) -> Any:
    shape = jax.eval_shape(_plain(params), image, kernel)
    return jax.core.ShapedArray(shape.shape, shape.dtype)


@loop_convolution_p.def_impl
def _evaluated(image: Any, kernel: Any, **params: Any) -> Any:
    return jax.jit(_plain(params))(image, kernel)


loop_convolution_p.def_abstract_eval(_abstract)
ad.defbilinear(loop_convolution_p, _cotangent_of_image, _cotangent_of_kernel)
batching.primitive_batchers[loop_convolution_p] = _batched
mlir.register_lowering(loop_convolution_p, mlir.lower_fun(convolved, multiple_results=False))
