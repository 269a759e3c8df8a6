"""What "the same result" means to a test, and `jax` with another `vmap` for a library to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROUNDING = 1e-4


def assert_same(ours: Any, bare: Any, *, rounding: float = ROUNDING) -> None:
    """Trees, shapes, dtypes and weak types are equal; values too, floats within `rounding`."""
    assert jax.tree.structure(ours) == jax.tree.structure(bare)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(bare), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.dtype == jax.dtypes.float0:
            continue
        assert jax.typeof(one).weak_type == jax.typeof(other).weak_type
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if jnp.issubdtype(one.dtype, np.inexact):
            one, other = (np.asarray(each).astype(np.complex128) for each in (one, other))
            np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)
        else:
            np.testing.assert_array_equal(one, other)


class JaxWithOtherVmap:
    """Stands where a library has `jax`, so that its `jax.vmap` is another; autobatch's is not."""

    def __init__(self, vmap: Callable[..., Any]) -> None:
        self.vmap = vmap

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)
