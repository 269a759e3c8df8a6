"""Trains with differential privacy: clips the gradient of every example, sums them, adds noise.

The clipping needs each gradient by itself, so `jax.vmap` holds as many copies of the parameters as
there are examples. Here the function of one example clips its own gradient, and `out_axes` says
that gradients are summed up while their norms are kept one per example.
"""

import jax
import jax.numpy as jnp
import optax
from _timing import compared
from sklearn.datasets import load_digits

from autobatch import SUM, autobatch

STEPS, CLIP, NOISE = 30, 1.0, 1.0


def loss(params, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, image), label)


def logits(params, image):
    hidden = jnp.tanh(params["hidden"] @ image.ravel())
    return params["readout"] @ hidden


def clipped_gradient(params, image, label):
    """Returns the gradient of one example, at most `CLIP` long, and how long it was."""
    gradient = jax.grad(loss)(params, image, label)
    norm = optax.tree.norm(gradient)
    return optax.tree.scale(jnp.minimum(1, CLIP / norm), gradient), norm


sum_of_clipped = autobatch(clipped_gradient, (None, 0, 0), (SUM, 0))


@jax.jit
def plain_sum_of_clipped(params, images, labels):
    gradients, norms = jax.vmap(clipped_gradient, (None, 0, 0))(params, images, labels)
    return jax.tree.map(lambda each: each.sum(0), gradients), norms


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "hidden": jax.random.normal(keys[0], (64, 64)) / 8,
        "readout": jax.random.normal(keys[1], (10, 64)) / 8,
    }
    digits = load_digits()
    images, labels = jnp.float32(digits.images / 16), jnp.int32(digits.target)
    optimizer = optax.adam(0.02)

    @jax.jit
    def update(params, state, total, key):
        noise = optax.tree.random_like(key, total, jax.random.normal)
        noisy = jax.tree.map(lambda g, n: (g + CLIP * NOISE * n) / len(labels), total, noise)
        updates, state = optimizer.update(noisy, state)
        return optax.apply_updates(params, updates), state

    arguments = params, images, labels
    state = optimizer.init(params)
    for key in jax.random.split(keys[2], STEPS):
        total, norms = sum_of_clipped(params, images, labels)
        params, state = update(params, state, total, key)
    guesses = jax.vmap(logits, (None, 0))(params, images).argmax(1)
    print(f"accuracy after {STEPS} steps: {(guesses == labels).mean():.0%}")
    print(f"gradients that were clipped in the last step: {(norms > CLIP).mean():.0%}")

    print(sum_of_clipped.explain(*arguments))
    print(compared(plain_sum_of_clipped, sum_of_clipped, *arguments))


if __name__ == "__main__":
    main()
