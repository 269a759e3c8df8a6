"""The models of the training benchmark, and what an expert writes to train them in little memory.

A model is the loss of one example, its parameters and a batch. A form maps the loss over the batch,
so many rows at a time, and returns the gradient by the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from optax.microbatching import micro_grad

Loss = Callable[[Any, Any, Any], Any]
"""The loss of one example, by the parameters, its input and its label."""
Batch = tuple[Any, Any, Any]
"""Parameters, inputs and labels."""
Gradient = Callable[[Any, Any, Any], Any]
"""The gradient of the losses of a batch, by the parameters."""
AXES = (None, 0, 0)
CLASSES = 10

GRID = tuple(2**power for power in range(3, 13))
STEPS_MOST = 128
"""Smaller chunks, in more steps, are left out: they are slower, and save little memory."""

# Models.


def mlp(rows: int = 10_000) -> tuple[Loss, Batch]:
    """Four dense layers."""

    def loss(params: Any, x: Any, label: Any) -> Any:
        *hidden, last = params
        for weights, bias in hidden:
            x = jax.nn.relu(x @ weights + bias)
        return _cross_entropy(x @ last[0] + last[1], label)

    sizes = (64, 256, 256, 256, CLASSES)
    params = [
        (_normal(seed, size, after) / np.float32(size) ** 0.5, np.zeros(after, np.float32))
        for seed, (size, after) in enumerate(pairwise(sizes))
    ]
    return loss, (params, _normal(9, rows, sizes[0]), _labels(rows))


def cnn(rows: int = 1024) -> tuple[Loss, Batch]:
    """Two convolutions with pooling over images of 28 x 28, and a dense layer."""

    def loss(params: Any, image: Any, label: Any) -> Any:
        *kernels, dense = params
        for kernel in kernels:
            image = _pooled(jax.nn.relu(_convolved(image, kernel)))
        return _cross_entropy(image.reshape(-1) @ dense, label)

    params = (
        _normal(0, 3, 3, 1, 8) / 3,
        _normal(1, 3, 3, 8, 8) / 8,
        _normal(2, 7 * 7 * 8, CLASSES) / 20,
    )
    return loss, (params, _normal(9, rows, 28, 28, 1), _labels(rows))


def transformer(rows: int = 250) -> tuple[Loss, Batch]:
    """A block of attention and two dense layers over 48 steps of 96 features."""
    length, width, heads = 48, 96, 4

    def attention(params: Any, x: Any) -> Any:
        query, key, value = (
            (x @ params[name]).reshape(length, heads, -1) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("qhd,khd->hqk", query, key) / np.float32(width / heads) ** 0.5
        mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), value)
        return mixed.reshape(length, width) @ params["out"]

    def loss(params: Any, x: Any, label: Any) -> Any:
        x = x + attention(params, jax.nn.standardize(x))
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ params["up"]) @ params["down"]
        return _cross_entropy(x.mean(0) @ params["classes"], label)

    shapes = {
        "query": (width, width),
        "key": (width, width),
        "value": (width, width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "classes": (width, CLASSES),
    }
    params = {
        name: _normal(seed, *shape) / np.float32(shape[0]) ** 0.5
        for seed, (name, shape) in enumerate(shapes.items())
    }
    return loss, (params, _normal(9, rows, length, width), _labels(rows))


MODELS: dict[str, Callable[..., tuple[Loss, Batch]]] = {
    each.__name__: each for each in (mlp, cnn, transformer)
}


# Gradients of a batch as a whole.


def sum_of_gradients(loss: Loss) -> Gradient:
    """The gradient of every row, and the sum of them."""

    def gradient(params: Any, x: Any, y: Any) -> Any:
        rows = jax.vmap(jax.grad(loss), AXES)(params, x, y)
        return jax.tree.map(lambda leaf: leaf.sum(0), rows)

    return gradient


def gradient_of_sum(loss: Loss) -> Gradient:
    """The gradient of the sum of the losses, which never makes the gradient of one row."""
    return jax.grad(lambda params, x, y: jax.vmap(loss, AXES)(params, x, y).sum())


def gradient_of_mean(mapped: Callable[..., Any]) -> Gradient:
    """The gradient of the mean of losses that `mapped` makes of a batch."""
    return jax.grad(lambda params, x, y: mapped(params, x, y).mean())


# Forms: the same in chunks of so many rows.


def scan_gradient_of_sum(loss: Loss, size: int) -> Gradient:
    """Adds up, in the carry of a scan, the gradient of the sum of every chunk."""
    return _scan(gradient_of_sum(loss), size)


def scan_sum_of_gradients(loss: Loss, size: int) -> Gradient:
    """Adds up, in the carry of a scan, the gradients of the rows of every chunk."""
    return _scan(sum_of_gradients(loss), size)


def optax_micro_grad(loss: Loss, size: int) -> Gradient:
    """What optax has for it."""
    gradient = micro_grad(loss, batch_argnums=(1, 2), keep_batch_dim=False, microbatch_size=size)
    return lambda params, x, y: gradient(params, x, y)[0]


def scan_checkpoints(loss: Loss, size: int) -> Gradient:
    """The gradient of a scan over chunks that are computed again on the way back."""

    def mean(params: Any, x: Any, y: Any) -> Any:
        rows = x.shape[0]

        # Sliced within the checkpoint, so that what it keeps is no copy of the batch.
        def chunk(params: Any, start: Any, size: int) -> Any:
            return jax.vmap(loss, AXES)(params, _rows(x, start, size), _rows(y, start, size)).sum()

        def step(total: Any, start: Any) -> tuple[Any, None]:
            kept = jax.checkpoint(chunk, static_argnums=2, prevent_cse=False)
            return total + kept(params, start, size), None

        total, _ = jax.lax.scan(step, jnp.zeros((), x.dtype), _starts(rows, size))
        if rows % size:
            total += jax.checkpoint(chunk, static_argnums=2)(
                params, rows - rows % size, rows % size
            )
        return total / rows

    return jax.grad(mean)


def _scan(gradient: Gradient, size: int) -> Gradient:
    def accumulated(params: Any, x: Any, y: Any) -> Any:
        rows = x.shape[0]

        def added(total: Any, start: Any, size: int) -> Any:
            chunk = gradient(params, _rows(x, start, size), _rows(y, start, size))
            return jax.tree.map(jnp.add, total, chunk)

        total, _ = jax.lax.scan(
            lambda total, start: (added(total, start, size), None),
            jax.tree.map(jnp.zeros_like, params),
            _starts(rows, size),
        )
        return added(total, rows - rows % size, rows % size) if rows % size else total

    return accumulated


def _starts(rows: int, size: int) -> Any:
    return jnp.arange(0, rows - rows % size, size)


def _rows(batch: Any, start: Any, size: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(batch, start, size)


FORMS: dict[str, Callable[[Loss, int], Gradient]] = {
    each.__name__: each
    for each in (scan_gradient_of_sum, scan_sum_of_gradients, optax_micro_grad, scan_checkpoints)
}


def sizes_of(form: str, rows: int) -> list[int]:
    """Returns the sizes of the grid; optax takes divisors of the rows: the largest not above."""
    sizes = [size for size in GRID if rows / STEPS_MOST <= size < rows]
    if form == optax_micro_grad.__name__:
        sizes = [max(each for each in range(1, size + 1) if rows % each == 0) for size in sizes]
    return sorted(set(sizes))


# What models are made of.


def _cross_entropy(logits: Any, label: Any) -> Any:
    return -jax.nn.log_softmax(logits)[label]


def _normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _labels(rows: int) -> Any:
    return np.random.default_rng(rows).integers(CLASSES, size=rows, dtype=np.int32)


def _convolved(image: Any, kernel: Any) -> Any:
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        image[None], kernel, (1, 1), "SAME", dimension_numbers=dimensions
    )[0]


def _pooled(image: Any) -> Any:
    """Returns the means of squares of 2 x 2."""
    height, width, channels = image.shape
    return image.reshape(height // 2, 2, width // 2, 2, channels).mean((1, 3))
