"""Runs chains of Hamiltonian Monte Carlo side by side or one after another: whichever is faster.

numpyro leaves that to its user, as `chain_method`. Side by side, all chains compute as many
leapfrog steps as the one that needs the most; one after another, none waits, but a single chain may
not keep the processor busy. Here a chain is a function of its key, mapped over keys.

Samplers amplify rounding errors, and a strategy whose samples differ from those of `jax.vmap` is
not used. So they run in double precision.
"""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from _timing import compared
from numpyro.diagnostics import summary
from numpyro.infer import HMC, MCMC
from numpyro.infer.util import log_density
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

from autobatch import Budget, autobatch

jax.config.update("jax_enable_x64", True)

CHAINS = 8
DATA = load_breast_cancer()
NAMES = DATA.feature_names[:5]
FEATURES, IS_BENIGN = jnp.asarray(scale(DATA.data[:, :5])), jnp.asarray(DATA.target)


def regression():
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([len(NAMES)]).to_event(1))
    numpyro.sample("is_benign", dist.Bernoulli(logits=FEATURES @ weights), obs=IS_BENIGN)


def potential(sites):
    return -log_density(regression, (), {}, sites)[0]


def chain(key):
    """Returns the samples of one chain."""
    kernel = HMC(potential_fn=potential, trajectory_length=1.5)
    mcmc = MCMC(kernel, num_warmup=100, num_samples=100, progress_bar=False)
    key, start = jax.random.split(key)
    mcmc.run(key, init_params={"weights": jax.random.normal(start, NAMES.shape)})
    return mcmc.get_samples()


def main():
    # A call is a whole run of the chains; fewer than usual will share the cost of a compile.
    chains = autobatch(chain, budget=Budget(expected_calls=500))
    keys = jax.random.split(jax.random.key(0), CHAINS)
    weights = summary(chains(keys))["weights"]
    for name, mean, r_hat in zip(NAMES, weights["mean"], weights["r_hat"], strict=True):
        print(f"{name:15} {mean:5.2f}   r-hat {r_hat:.2f}")

    print(chains.explain(keys))
    print(compared(jax.jit(jax.vmap(chain)), chains, keys))


if __name__ == "__main__":
    main()
