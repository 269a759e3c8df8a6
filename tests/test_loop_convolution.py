"""Convolutions of differentiated loops: JAX's values and derivatives, in one form only."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autobatch import autobatch
from autobatch._loop_convolution import for_loops

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "strided": {"window_strides": (2, 1), "padding": "VALID"},
    "dilated": {"lhs_dilation": (2, 1), "rhs_dilation": (1, 2), "padding": ((1, 1), (0, 2))},
    "padded unevenly": {"padding": ((0, 2), (1, 0))},
    "features first": {"dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    "mixed": {"dimension_numbers": ("HNWC", "IHOW", "CNHW")},
    "grouped": {"feature_group_count": 2},
    "batch in groups": {"batch_group_count": 2},
}


def image_and_kernel(form: dict[str, Any]) -> tuple[Any, Any]:
    image = {"N": 4, "H": 6, "W": 5, "C": 4}
    inputs = 4 // form.get("feature_group_count", 1)
    kernel = {"H": 3, "W": 2, "I": inputs, "O": 6}
    image_order, kernel_order, _ = form.get("dimension_numbers", ("NHWC", "HWIO", "NHWC"))
    draw = np.random.default_rng(0).standard_normal
    return (
        draw([image[each] for each in image_order]),
        draw([kernel[each] for each in kernel_order]),
    )


@pytest.mark.parametrize("name", FORMS)
def test_values_and_derivatives_are_jaxs(name: str) -> None:
    form = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        **FORMS[name],
    }
    with jax.enable_x64(True):
        args = image_and_kernel(FORMS[name])

        def plain(image: Any, kernel: Any) -> Any:
            return jax.lax.conv_general_dilated(image, kernel, **form)

        jaxpr = for_loops(jax.make_jaxpr(jax.jit(plain))(*args).jaxpr)
        assert "loop_convolution" in str(jaxpr)

        def ours(image: Any, kernel: Any) -> Any:
            return jax.core.eval_jaxpr(jaxpr, (), image, kernel)[0]

        def total(fun: Any) -> Any:
            return lambda image, kernel: jnp.sum(jnp.sin(fun(image, kernel)))

        def second(fun: Any) -> Any:
            gradient = jax.grad(total(fun), (0, 1))
            return lambda *args: jax.jvp(gradient, args, args)[1]

        def batched(fun: Any) -> Any:
            return jax.vmap(jax.grad(total(fun), (0, 1)), (0, None))

        stack = np.stack([args[0], 2 * args[0]]), args[1]
        for transform, values in (
            (lambda fun: fun, args),
            (lambda fun: jax.grad(total(fun), (0, 1)), args),
            (second, args),
            (batched, stack),
            (lambda fun: jax.vmap(fun), tuple(np.stack([each, -each]) for each in args)),
        ):
            got, wanted = (jax.jit(transform(fun))(*values) for fun in (ours, plain))
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11), got, wanted
            )
        np.testing.assert_allclose(ours(*args), plain(*args), rtol=1e-12, atol=1e-12)


def network(kernels: Any, image: Any) -> Any:
    image = image[None]
    for kernel in kernels:
        image = jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME"))
    return jnp.sum(image**2)


def test_a_differentiated_loop_holds_one_form_only() -> None:
    kernels = [jnp.ones((4, 3, 3, 3)), jnp.ones((2, 4, 3, 3))]
    images = jnp.ones((8, 3, 6, 6))
    losses = autobatch(network, (None, 0), strategy="chunked:3+remat")
    gradient = jax.jit(jax.grad(lambda kernels, images: losses(kernels, images).sum()))
    labels = re.findall(r"dim_labels=(\S+)", gradient.lower(kernels, images).compile().as_text())
    assert len(labels) >= 4
    assert {each.rstrip(",") for each in labels} == {"b01f_01io->b01f"}


def test_programs_without_convolutions_are_left_as_they_are() -> None:
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x).sum())(jnp.ones(3)).jaxpr
    assert for_loops(jaxpr) is jaxpr
