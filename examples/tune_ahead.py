"""Tunes a function for the shapes that a service will see, before the service starts.

Run it on the machine of the service, where both use the same store. `autobatch tune` does the same
from the command line, in processes of their own.
"""

import jax
import jax.numpy as jnp

from autobatch import Budget, autobatch


@autobatch(in_axes=(None, 0), budget=Budget(expected_calls=100_000))
def score(weights, x):
    for weight in weights:
        x = jnp.tanh(weight @ x)
    return x.sum()


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(key, (32, 32)) / 6 for key in keys]
    for rows in (16, 128):
        x = jax.random.normal(jax.random.key(rows), (rows, 32))
        plan = score.tune(weights, x)
        print(f"{rows} rows: {plan.strategy}")
        print(score.explain(weights, x), end="\n\n")


if __name__ == "__main__":
    main()
