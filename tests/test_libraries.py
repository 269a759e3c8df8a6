"""Libraries that map functions give the same values with `autobatch` for their `jax.vmap`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import blackjax
import diffrax
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import nnx
from numpyro.infer import HMC, MCMC
from optax.microbatching import AccumulationType, micro_grad, micro_vmap
from same import JaxWithOtherVmap, assert_same

from autobatch import IneligibleStrategyError, autobatch

# The automatic choice, where it is tested, tries every family.
pytestmark = pytest.mark.usefixtures("exhaustive")

ROWS = 6
Wrap = Callable[..., Any]


@pytest.fixture(autouse=True)
def promotion_as_users_have_it() -> Iterator[None]:
    """The libraries were not written for the strict promotion of our own tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """What is asked here is whether values are right, not how fast."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def wrap(request: pytest.FixtureRequest) -> Iterator[Wrap]:
    """`autobatch` with a forced strategy or with the automatic choice; the test says which."""
    mapped: list[Any] = []

    def ours(fun: Callable[..., Any], *axes: Any, **options: Any) -> Any:
        mapped.append(fun)
        return autobatch(fun, *axes, strategy=request.param, **options)

    yield ours
    assert mapped, "the library mapped nothing with it"


def strategies(*names: str | None) -> pytest.MarkDecorator:
    """Says for which strategies a test is run; None is the automatic choice, which compiles all."""
    return pytest.mark.parametrize("wrap", names, ids=str, indirect=True)


def plainly(fun: Callable[..., Any], *axes: Any, **options: Any) -> Any:
    return jax.jit(jax.vmap(fun, *axes, **options))


@functools.cache
def with_vmap(run: Callable[[Wrap], Any]) -> Any:
    """Returns what a program gives that maps with `jax.vmap`, compiled once for all strategies."""
    return run(plainly)


def floats(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def total_error(params: Any, x: Any, y: Any) -> Any:
    return jnp.sum((jnp.tanh(params["w"] @ x + params["b"]) - y) ** 2)


def problem() -> tuple[Any, Any, Any]:
    """Returns parameters for `total_error`, and rows of data."""
    return {"w": floats(2, 3), "b": floats(2)}, floats(ROWS, 3), floats(ROWS, 2, seed=1)


# Optax


@strategies("map", None)
@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("accumulator", [AccumulationType.SUM, AccumulationType.CONCAT])
def test_optax_microbatches(
    microbatch_size: int | None, accumulator: AccumulationType, wrap: Wrap
) -> None:
    def gradients(vmap: Any) -> Any:
        return micro_vmap(
            jax.value_and_grad(total_error),
            in_axes=(None, 0, 0),
            microbatch_size=microbatch_size,
            accumulator=accumulator,
            vmap_fn=vmap,
        )(*problem())

    assert_same(gradients(wrap), gradients(jax.vmap))


@strategies("map", "chunked:2", None)
def test_optax_microbatches_of_keywords_inside_jit(wrap: Wrap) -> None:
    params, x, y = problem()

    def errors(vmap: Any) -> Any:
        fun = functools.partial(total_error, params)
        return jax.jit(micro_vmap(fun, in_axes=0, microbatch_size=2, vmap_fn=vmap))(x, y=y)

    assert_same(errors(wrap), errors(jax.vmap))


@strategies("map", None)
def test_optax_clips_gradients_of_single_examples(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clipped() -> Any:
        clip = lambda g: optax.projections.projection_l2_ball(g, 0.5)  # noqa: E731
        return micro_grad(
            total_error,
            batch_argnums=(1, 2),
            keep_batch_dim=False,
            microbatch_size=3,
            transform_fn=clip,
            metrics_fn=optax.tree.norm,
        )(*problem())

    expected = clipped()
    ours = functools.partial(micro_vmap, vmap_fn=wrap)
    monkeypatch.setattr("optax.microbatching._microbatching.micro_vmap", ours)
    assert_same(clipped(), expected)


# Equinox


@pytest.fixture
def filter_vmap(monkeypatch: pytest.MonkeyPatch) -> Callable[[Wrap], None]:
    """Returns what puts another function where `equinox.filter_vmap` has `jax.vmap`."""

    def put(vmap: Wrap) -> None:
        monkeypatch.setattr("equinox._vmap_pmap.jax", JaxWithOtherVmap(vmap))

    return put


def perceptron(key: Any) -> Any:
    return eqx.nn.MLP(3, 2, width_size=4, depth=1, key=key)


def arrays(tree: Any) -> Any:
    return eqx.filter(tree, eqx.is_array)


def new_ensemble() -> Any:
    return eqx.filter_vmap(perceptron)(jax.random.split(jax.random.key(0), ROWS))


ensemble = functools.cache(new_ensemble)


EQUINOX: dict[str, Callable[[], Any]] = {
    "making models": lambda: arrays(new_ensemble()),
    "one input for all models": lambda: eqx.filter_vmap(
        lambda model, x: model(x), in_axes=(eqx.if_array(0), None)
    )(ensemble(), floats(3)),
    "an input for each model": lambda: eqx.filter_vmap(lambda model, x: model(x))(
        ensemble(), jnp.asarray(floats(ROWS, 3))
    ),
    "axes by name": lambda: eqx.filter_vmap(
        lambda x, y, scale: (scale * (x - y), "static"), in_axes={"x": 1}, out_axes=eqx.if_array(1)
    )(jnp.asarray(floats(3, ROWS)), jnp.asarray(floats(ROWS, 3)), 2.0)[0],
    "axis_size alone": lambda: eqx.filter_vmap(lambda x: x + 1, in_axes=None, axis_size=3)(
        jnp.asarray(floats(2))
    ),
    "inside filter_jit": lambda: eqx.filter_jit(eqx.filter_vmap(lambda model, x: model(x)))(
        ensemble(), jnp.asarray(floats(ROWS, 3))
    ),
    "nested": lambda: eqx.filter_vmap(
        lambda model, xs: eqx.filter_vmap(model)(xs), in_axes=(eqx.if_array(0), None)
    )(ensemble(), jnp.asarray(floats(5, 3))),
    "gradients inside": lambda: eqx.filter_vmap(
        eqx.filter_grad(lambda model, x: jnp.sum(model(x) ** 2)), in_axes=(None, 0)
    )(perceptron(jax.random.key(1)), jnp.asarray(floats(ROWS, 3))),
    "gradients outside": lambda: eqx.filter_grad(
        lambda model, xs: jnp.sum(eqx.filter_vmap(model)(xs) ** 2)
    )(perceptron(jax.random.key(1)), jnp.asarray(floats(ROWS, 3))),
}


@pytest.mark.parametrize("name", EQUINOX)
@strategies("map")
def test_equinox_filter_vmap(name: str, wrap: Wrap, filter_vmap: Callable[[Wrap], None]) -> None:
    expected = EQUINOX[name]()
    filter_vmap(wrap)
    assert_same(EQUINOX[name](), expected)


@pytest.mark.parametrize("name", ["one input for all models", "gradients inside"])
@strategies(None)
def test_equinox_filter_vmap_of_a_tuned_function(
    name: str, wrap: Wrap, filter_vmap: Callable[[Wrap], None]
) -> None:
    test_equinox_filter_vmap(name, wrap, filter_vmap)


def normalised() -> Any:
    """Returns outputs and the new state of a layer that looks at the whole batch."""
    layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode="batch")
    mapped = eqx.filter_vmap(layer, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    outputs, state = mapped(jnp.asarray(floats(ROWS, 3)), state)
    return outputs, state.get(layer.batch_state_index)


def test_equinox_batch_norm_is_mapped_by_vmap_alone(filter_vmap: Callable[[Wrap], None]) -> None:
    expected = normalised()
    filter_vmap(autobatch)
    assert_same(normalised(), expected)
    filter_vmap(functools.partial(autobatch, strategy="map"))
    with pytest.raises(IneligibleStrategyError, match="axis 'batch'"):
        normalised()


@strategies("map", "chunked:4", None)
def test_equinox_gradients_of_single_examples(wrap: Wrap) -> None:
    def loss(model: Any, x: Any, y: Any) -> Any:
        return jnp.mean((model(x) - y) ** 2)

    args = perceptron(jax.random.key(0)), floats(ROWS, 3), floats(ROWS, 2)
    gradients, axes = eqx.filter_value_and_grad(loss), (None, 0, 0)
    assert_same(wrap(gradients, axes)(*args), jax.vmap(gradients, axes)(*args))


# Flax


class Convolutional(nn.Module):
    """A small Linen model with dropout."""

    @nn.compact
    def __call__(self, image: Any, *, deterministic: bool) -> Any:
        hidden = nn.relu(nn.Conv(features=2, kernel_size=(3, 3))(image))
        hidden = nn.Dropout(0.5, deterministic=deterministic)(hidden)
        return nn.Dense(features=3)(hidden.reshape(-1))


def convolutional_gradients(vmap: Wrap) -> Any:
    model, images = Convolutional(), floats(ROWS, 5, 5, 1)
    labels = np.arange(ROWS, dtype=np.int32) % 3
    keys = jax.random.split(jax.random.key(1), ROWS)
    params = model.init(jax.random.key(0), images[0], deterministic=True)

    def loss(params: Any, image: Any, label: Any, key: Any) -> Any:
        logits = model.apply(params, image, deterministic=False, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    return vmap(jax.value_and_grad(loss), (None, 0, 0, 0))(params, images, labels, keys)


@strategies("map", None)
def test_flax_linen_gradients_of_single_examples(wrap: Wrap) -> None:
    assert_same(convolutional_gradients(wrap), with_vmap(convolutional_gradients))


class Perceptron(nnx.Module):
    """A small NNX model."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.norm(self.first(x))))


@strategies("map", None)
def test_flax_nnx_gradients_of_single_examples(wrap: Wrap) -> None:
    graph, params = nnx.split(Perceptron(nnx.Rngs(0)))

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

    gradients, axes = jax.value_and_grad(loss), (None, 0, 0)
    args = params, floats(ROWS, 3), floats(ROWS, 2)
    assert_same(wrap(gradients, axes)(*args), plainly(gradients, axes)(*args))


@strategies("map", "chunked:4")
def test_flax_nnx_vmap(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    def outputs() -> Any:
        """Makes models, then evaluates each on data of its own."""

        @nnx.split_rngs(splits=ROWS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> Any:
            return Perceptron(rngs)

        models = make(nnx.Rngs(0))
        return nnx.vmap(lambda model, x: model(x))(models, jnp.asarray(floats(ROWS, 3)))

    expected = outputs()
    monkeypatch.setattr("flax.nnx.transforms.iteration.jax", JaxWithOtherVmap(wrap))
    assert_same(outputs(), expected)


# Samplers. In double precision, since they amplify rounding; but what they decide is the same.


def regression(x: Any, y: Any) -> None:
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(slope * x, 0.3), obs=y)


def numpyro_chains(vmap: Wrap) -> Any:
    mcmc = MCMC(
        HMC(regression, num_steps=4, trajectory_length=None),
        num_warmup=8,
        num_samples=8,
        num_chains=2,
        chain_method=vmap,
        progress_bar=False,
    )
    x = np.linspace(-1, 1, 20)
    y = 2 * x + 0.1 * np.sin(37 * x)
    mcmc.run(jax.random.key(0), x, y, extra_fields=("accept_prob", "diverging"))
    return mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(group_by_chain=True)


@strategies("map", None)
def test_numpyro_chains(wrap: Wrap) -> None:
    with jax.enable_x64(True):
        assert_same(numpyro_chains(wrap), with_vmap(numpyro_chains))


def log_density(position: Any) -> Any:
    x, y = position["x"], position["y"]
    return -0.5 * x**2 - 5 * (y - x**2) ** 2


SAMPLER = {"step_size": 0.3, "inverse_mass_matrix": np.ones(2)}


def chain(key: Any, position: Any) -> Any:
    """Returns the steps of one chain, and what the sampler says of each."""
    sampler = blackjax.hmc(log_density, **SAMPLER, num_integration_steps=3)
    step = lambda state, key: sampler.step(key, state)  # noqa: E731
    return jax.lax.scan(step, sampler.init(position), jax.random.split(key, 5))


def start(chains: int) -> Any:
    keys = jax.random.split(jax.random.key(0), chains)
    return keys, {"x": np.linspace(-1, 1, chains), "y": np.linspace(0, 2, chains)}


def hmc_chains(vmap: Wrap) -> Any:
    return vmap(chain)(*start(3))


@strategies("map", "chunked:2", None)
def test_blackjax_chains(wrap: Wrap) -> None:
    with jax.enable_x64(True):
        assert_same(hmc_chains(wrap), with_vmap(hmc_chains))


def nuts_steps(vmap: Wrap) -> Any:
    sampler = blackjax.nuts(log_density, **SAMPLER, max_num_doublings=3)
    keys, positions = start(3)
    step = lambda states, keys: 2 * (vmap(sampler.step)(keys, states)[0],)  # noqa: E731
    keys = jax.vmap(lambda key: jax.random.split(key, 5), out_axes=1)(keys)
    states = vmap(sampler.init)(positions)
    return jax.jit(lambda states, keys: jax.lax.scan(step, states, keys))(states, keys)


@strategies("map")
def test_blackjax_steps_of_all_chains_inside_a_scan(wrap: Wrap) -> None:
    with jax.enable_x64(True):
        assert_same(nuts_steps(wrap), with_vmap(nuts_steps))


# Differential equations


def oscillator(start: Any, damping: Any) -> Any:
    """Returns the solution of an oscillator that bends its own damping."""

    def slope(t: Any, y: Any, args: Any) -> Any:
        return jnp.stack([y[1], -y[0] + args * (1 - y[0] ** 2) * y[1]])

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(slope),
        diffrax.Bosh3(),
        t0=0.0,
        t1=3.0,
        dt0=0.1,
        y0=start,
        args=damping,
        saveat=diffrax.SaveAt(ts=jnp.linspace(0, 3, 4)),
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
    )
    return solution.ys, solution.stats["num_steps"], solution.result


def oscillators(vmap: Wrap) -> Any:
    return vmap(oscillator)(np.linspace(0, 2, 6).reshape(3, 2), np.linspace(0, 8, 3))


@strategies("map", None)
def test_diffrax_ensemble(wrap: Wrap) -> None:
    with jax.enable_x64(True):
        ours, bare = oscillators(wrap), with_vmap(oscillators)
    assert len(set(np.asarray(bare[1]))) > 1, "rows should need different numbers of steps"
    assert_same(ours, bare)


def gradient_of_decays(vmap: Wrap) -> Any:
    def last(rate: Any, start: Any) -> Any:
        term, solver = diffrax.ODETerm(lambda t, y, rate: -rate * y), diffrax.Euler()
        return diffrax.diffeqsolve(
            term, solver, t0=0.0, t1=1.0, dt0=0.25, y0=start, args=rate, max_steps=4
        ).ys

    loss = lambda rate: jnp.sum(vmap(last, (None, 0))(rate, floats(ROWS)) ** 2)  # noqa: E731
    return jax.grad(loss)(jnp.float32(0.5))


@strategies("map")
def test_diffrax_gradient_through_an_ensemble(wrap: Wrap) -> None:
    assert_same(gradient_of_decays(wrap), with_vmap(gradient_of_decays))


def noisy(key: Any, start: Any) -> Any:
    """Returns one path of a mean-reverting process."""
    brownian = diffrax.UnsafeBrownianPath(shape=(), key=key)
    terms = diffrax.MultiTerm(
        diffrax.ODETerm(lambda t, y, args: -y),
        diffrax.ControlTerm(lambda t, y, args: jnp.asarray(0.3), brownian),
    )
    return diffrax.diffeqsolve(
        terms,
        diffrax.Euler(),
        t0=0.0,
        t1=1.0,
        dt0=0.1,
        y0=start,
        saveat=diffrax.SaveAt(steps=True),
        adjoint=diffrax.DirectAdjoint(),
        max_steps=16,
    ).ys


@strategies("map")
def test_diffrax_paths_of_an_equation_with_noise(wrap: Wrap) -> None:
    args = jax.random.split(jax.random.key(0), ROWS), floats(ROWS)
    assert_same(wrap(noisy)(*args), plainly(noisy)(*args))
