"""`autobatch demo`: three functions tuned, then the same functions in a new process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from autobatch._cli._options import echo_json, json_option
from autobatch._units import format_seconds


@dataclass(frozen=True, kw_only=True)
class _Example:
    about: str
    batched: Any
    args: tuple[Any, ...]


@click.command()
@json_option
@click.option("--store", hidden=True, help="Folder whose records are used instead of tuning.")
def demo(as_json: bool, store: str | None) -> None:
    """Tune three functions, then call them again in a new process, from the record."""
    if store is not None:
        calls = [_called(each) for each in _examples(store)]
        echo_json(calls) if as_json else _show(calls)
        return
    with tempfile.TemporaryDirectory(prefix="autobatch-demo-") as folder:
        if not as_json:
            click.echo("The first call of each function tunes it:\n")
        calls = [_called(each) for each in _examples(folder)]
        if not as_json:
            _show(calls)
            click.echo("The same in a new process, from the record:\n")
        again = [sys.executable, "-m", "autobatch", "demo", "--json", "--store", folder]
        child = subprocess.run(again, check=False, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        raise click.ClickException("the second process failed")
    if as_json:
        echo_json({"tuned": calls, "recalled": json.loads(child.stdout)})
    else:
        _show(json.loads(child.stdout))


def _called(example: _Example) -> dict[str, Any]:
    """Calls a function twice and returns what was chosen and how long the calls took."""
    first_s, later_s = _seconds(example), _seconds(example)
    plan = example.batched.plan(*example.args)
    return {
        "about": example.about,
        "name": example.batched.__name__,
        "key": plan.key,
        "source": plan.source,
        "strategy": str(plan.strategy),
        "first_call_s": first_s,
        "later_call_s": later_s,
        "table": example.batched.explain(*example.args),
    }


def _seconds(example: _Example) -> float:
    import jax

    start = time.perf_counter()
    jax.block_until_ready(example.batched(*example.args))
    return time.perf_counter() - start


def _show(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        click.echo(call["about"])
        click.echo(call["table"])
        first, later = format_seconds(call["first_call_s"]), format_seconds(call["later_call_s"])
        click.echo(f"   first call {first}, a later one {later}\n")


def _examples(store: str) -> list[_Example]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from autobatch import autobatch
    from autobatch._strategies import UNROLLED

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))

    def vector_dot(x: Any, y: Any) -> Any:
        return jnp.dot(x, y)

    def rare_branch(matrix: Any, x: Any, heavy: Any) -> Any:
        def settle(x: Any) -> Any:
            return jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(matrix @ y), x)

        return jax.lax.cond(heavy, settle, lambda x: x, x)

    def loss(weights: list[Any], x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(weight @ x)
        return jnp.sum(x**2)

    def batched(function: Callable[..., Any], in_axes: Any = 0) -> Any:
        return autobatch(function, in_axes, store=store)

    dot = batched(vector_dot)
    # The search would not compile 200 copies; here it is shown why.
    dot._planner.also = (UNROLLED,)
    gradient = jax.grad(loss)
    gradient.__name__ = "loss_gradient"
    return [
        _Example(
            about="Row by row dot product, with the loop unrolled too:",
            batched=dot,
            args=(normal(200, 1000), normal(200, 1000)),
        ),
        _Example(
            about="A heavy branch that 2 of 128 rows take:",
            batched=batched(rare_branch, (None, 0, 0)),
            args=(normal(100, 100) / 10, normal(128, 100), jnp.arange(128) % 64 == 0),
        ),
        _Example(
            about="Per-example gradients:",
            batched=batched(gradient, (None, 0)),
            args=([normal(64, 64) / 8 for _ in range(4)], normal(512, 64)),
        ),
    ]
