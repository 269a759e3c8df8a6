"""Trains on the whole data set at once, within a memory limit, without choosing a chunk size.

A gradient over a large batch needs the intermediate values of every row. If they do not fit, the
usual remedy is a loop that adds up the gradients of micro-batches of a size found by trial. Here
the loss is written for one image, `out_axes=MEAN` adds up the gradients, and the budget says how
much memory that may take.
"""

import jax
import jax.numpy as jnp
import optax
from _timing import compared
from sklearn.datasets import load_digits

from autobatch import MEAN, Budget, autobatch

STEPS = 30


def loss(params, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, image), label)


def logits(params, image):
    """Returns the scores of the ten digits for one image, from a small convolutional network."""
    x = image[None, None]
    for kernel in params["kernels"]:
        x = jax.nn.relu(jax.lax.conv(x, kernel, (1, 1), "SAME"))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "SAME")
    return params["readout"] @ x.ravel()


# `vmap` needs about 50 MiB for this batch, as `explain` shows if the budget allows it.
BUDGET = Budget(memory="16MiB", expected_calls=STEPS)
mean_gradient = autobatch(jax.value_and_grad(loss), (None, 0, 0), MEAN, budget=BUDGET)


@jax.jit
def plain_gradient(params, images, labels):
    rows = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(params, images, labels)
    return jax.tree.map(lambda each: each.mean(0), rows)


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "kernels": [
            jax.random.normal(keys[0], (8, 1, 3, 3)) / 3,
            jax.random.normal(keys[1], (16, 8, 3, 3)) / 8,
        ],
        "readout": jax.random.normal(keys[2], (10, 64)) / 8,
    }
    digits = load_digits()
    images, labels = jnp.float32(digits.images / 16), jnp.int32(digits.target)
    train, test = slice(1500), slice(1500, None)

    # Inside the jitted step there are only tracers, on which nothing can be measured. So the plan
    # is made here, on the real arrays; the step finds it by their shapes.
    mean_gradient.plan(params, images[train], labels[train])

    optimizer = optax.adam(0.02)

    @jax.jit
    def step(params, state):
        _, gradient = mean_gradient(params, images[train], labels[train])
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def accuracy(params):
        scores = jax.vmap(logits, (None, 0))(params, images[test])
        return (scores.argmax(1) == labels[test]).mean()

    before, state = accuracy(params), optimizer.init(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    print(
        f"accuracy on new images: {before:.0%} before, {accuracy(params):.0%} after {STEPS} steps"
    )

    arguments = params, images[train], labels[train]
    print(mean_gradient.explain(*arguments))
    print(compared(plain_gradient, mean_gradient, *arguments))


if __name__ == "__main__":
    main()
