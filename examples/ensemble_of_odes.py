"""Solves an ensemble of differential equations, a few of which need many more steps than the rest.

An adaptive solver takes as many steps as its equation needs. Under `jax.vmap` all equations step
until the last one is done: every one of them costs what the hardest costs. One after another, each
costs what it needs, but nothing is vectorised. Which is faster depends on the equations and the
device, so it is measured.
"""

import diffrax
import jax
import jax.numpy as jnp
from _timing import compared

from autobatch import autobatch

# In single precision rounding decides whether a step is accepted, and so how many there are.
jax.config.update("jax_enable_x64", True)


def slope(t, state, stiffness):
    """Returns the derivative of a Van der Pol oscillator."""
    x, velocity = state
    return jnp.stack([velocity, stiffness * (1 - x**2) * velocity - x])


def oscillator(stiffness):
    """Returns the state at time 20, and how many steps it took."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(slope),
        diffrax.Tsit5(),
        t0=0.0,
        t1=20.0,
        dt0=0.01,
        y0=jnp.array([2.0, 0.0]),
        args=stiffness,
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-4),
        max_steps=100_000,
    )
    return solution.ys[-1], solution.stats["num_steps"]


def main():
    oscillators = autobatch(oscillator)
    stiffness = jnp.logspace(-2, 2.5, 64)
    _, steps = oscillators(stiffness)
    print(f"steps: {steps.min()} to {steps.max()}, half of them at most {jnp.median(steps):.0f}")

    print(oscillators.explain(stiffness))
    print(compared(jax.jit(jax.vmap(oscillator)), oscillators, stiffness))


if __name__ == "__main__":
    main()
