"""Stand-ins for arrays that cannot be had: a call inside a trace has only shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from autobatch._nesting import is_busy
from autobatch._workload import Workload, equations

_VALUE_DEPENDENT = {"while", "cond"}
_CALLING_OUT = {"pure_callback", "ffi_call"}


def why_no_stand_ins(workload: Workload) -> str | None:
    """Returns why figures measured on stand-ins would say nothing, or None.

    Args:
        workload: the described call.
    """
    if is_busy():
        return "another autobatch function is being described or tuned"
    if any(isinstance(each, jax.core.Tracer) for each in workload.consts):
        return "it closes over traced values"
    if workload.row is None:
        return "only jax.vmap itself can map it"
    for argument in workload.arguments:
        if jnp.issubdtype(argument.dtype, jax.dtypes.prng_key) and "fry" not in str(argument.dtype):
            return "its keys are not of the default kind"
    for equation in equations(workload.row.jaxpr):
        if equation.primitive.name in _VALUE_DEPENDENT:
            return f"its run time depends on values (`{equation.primitive.name}`)"
        if equation.primitive.name in _CALLING_OUT:
            return f"`{equation.primitive.name}` must not see invented values"
    return None


def stand_ins(arguments: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Returns arrays of these shapes and dtypes, the same every time.

    Floats are standard normal, integers 0 because they may be indices, booleans mixed, keys valid.
    """
    rng = np.random.default_rng(0)
    return [_stand_in(each, rng) for each in arguments]


def _stand_in(argument: jax.ShapeDtypeStruct, rng: np.random.Generator) -> jax.Array:
    shape, dtype = argument.shape, argument.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0, impl="threefry2x32"), math.prod(shape)).reshape(
            shape
        )
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(rng.random(shape) < 0.5)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
        return jnp.asarray(values.astype(dtype))
    if jnp.issubdtype(dtype, jnp.floating):
        wide = np.float64 if dtype == np.float64 else np.float32
        return jnp.asarray(np.asarray(rng.standard_normal(shape, wide)).astype(dtype))
    return jnp.zeros(shape, dtype)
