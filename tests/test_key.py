"""Equal programs on equal devices have equal keys, in every process; any other has another."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import Function, described

from autobatch import _key
from autobatch._digest import digest
from autobatch._key import device_in_words, device_parts, key_parts, processor

XS = np.ones((5, 3), np.float32)
Parts = dict[str, Any]


def parts(fun: Function, *args: Any, name: str | None = None, **options: Any) -> Parts:
    workload = described(fun, *(args or (XS,)), **options)
    return key_parts(workload, jax.devices()[0], name=name)


def differing(one: Parts, other: Parts) -> set[str]:
    assert set(one) == set(other)
    assert (one == other) == (digest(one) == digest(other))
    return {each for each in one if one[each] != other[each]}


KEY_PAGE = Path(__file__).parent.parent / "docs" / "key.md"


@pytest.mark.source
def test_the_page_about_the_key_names_every_part() -> None:
    named = set(re.findall(r"`(\w+)`", KEY_PAGE.read_text()))
    assert set(parts(lambda x: x + 1)) <= named


# Same program


def named_one(image: jax.Array) -> jax.Array:
    """Returns something."""
    scaled = image * 2  # twice
    return jnp.sin(scaled)


def named_other(x: jax.Array) -> jax.Array:
    y = x * 2

    return jnp.sin(y)


def jitted(name: str) -> Function:
    def inner(x: jax.Array) -> jax.Array:
        return x + 1

    inner.__name__ = inner.__qualname__ = name
    return lambda x: jax.jit(inner)(x) * jax.jit(inner)(2 * x)


def with_custom_jvp(scale: float = 1.0) -> Function:
    @jax.custom_jvp
    def fun(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * scale

    fun.defjvps(lambda tangent, _, x: tangent * jnp.cos(x))
    return lambda x: fun(x)


def with_custom_vjp(scale: float = 1.0) -> Function:
    @jax.custom_vjp
    def fun(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * scale

    fun.defvjp(lambda x: (fun(x), x), lambda x, g: (g * jnp.cos(x),))
    return lambda x: fun(x)


def with_callback(callback: Function) -> Function:
    return lambda x: jax.pure_callback(
        callback, jax.ShapeDtypeStruct((3,), np.float32), x, vmap_method="sequential"
    )


def closing_over(array: Any) -> Function:
    return lambda x: x * array


def with_branches(flag: float = 1.0) -> Function:
    return lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, lambda y: y * flag, x)


def with_loop(steps: int = 3) -> Function:
    return lambda x: jax.lax.scan(lambda c, _: (c * 2, c.sum()), x, None, length=steps)


def with_while(bound: float = 9.0) -> Function:
    return lambda x: jax.lax.while_loop(lambda y: y.sum() < bound, lambda y: y * 2, x)


SAME = {
    "names of functions and variables, comments, docstrings": (named_one, named_other),
    "two lambdas": (lambda x: x * 2, lambda y: y * 2),
    "a partial": (functools.partial(lambda k, x: x * k, 2), lambda x: x * 2),
    "names of inner jits": (jitted("one"), jitted("other")),
    "values closed over": (closing_over(jnp.ones(3)), closing_over(jnp.zeros(3))),
    "numpy or jax closed over": (closing_over(np.ones(3, "f4")), closing_over(jnp.ones(3))),
    "addresses in relu": (lambda x: jax.nn.relu(x), lambda x: jax.nn.relu(x)),
    "gelu and softmax": (
        lambda x: jax.nn.softmax(jax.nn.gelu(x)), lambda x: jax.nn.softmax(jax.nn.gelu(x))
    ),
    "addresses of a custom_jvp": (with_custom_jvp(), with_custom_jvp()),
    "addresses of a custom_vjp": (with_custom_vjp(), with_custom_vjp()),
    "addresses of a callback": (with_callback(lambda x: x + 1), with_callback(lambda y: y + 1)),
    "random draws": (
        lambda x: x + jax.random.normal(jax.random.key(0), (3,)),
        lambda x: x + jax.random.normal(jax.random.key(0), (3,)),
    ),
    "branches": (with_branches(), with_branches()),
    "loops": (with_loop(), with_loop()),
    "open loops": (with_while(), with_while()),
    "gradients": (jax.grad(lambda x: jnp.sin(x).sum()), jax.grad(lambda y: jnp.sin(y).sum())),
    "gradients of custom functions": (
        jax.grad(lambda x: with_custom_vjp()(x).sum()),
        jax.grad(lambda x: with_custom_vjp()(x).sum()),
    ),
    "linear solves": (
        lambda x: jnp.linalg.solve(jnp.eye(3), x), lambda x: jnp.linalg.solve(jnp.eye(3), x)
    ),
    "checkpoints": (
        jax.checkpoint(lambda x: jnp.sin(x)), jax.checkpoint(lambda y: jnp.sin(y))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_program_is_the_same(name: str) -> None:
    one, other = SAME[name]
    assert differing(parts(one), parts(other)) == set()


@pytest.mark.parametrize("name", SAME)
def test_key_is_plain_json_without_addresses(name: str) -> None:
    found = parts(SAME[name][0])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert "0x" not in json.dumps(found)
    assert len(digest(found)) == 64


def test_names_of_arguments_do_not_matter_but_their_order_does() -> None:
    args = XS, np.ones(5, np.int32)
    one = parts(lambda x, n: x * 2, *args)
    assert differing(one, parts(lambda rows, count: rows * 2, *args)) == set()
    assert differing(one, parts(lambda n, x: x * 2, *args[::-1])) == {"program", "arguments"}


WEAK = jnp.broadcast_to(jnp.asarray(2.5), (5,))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(np.ones((5, 3), np.float32), jnp.zeros((5, 3)), id="numpy or jax"),
        pytest.param(WEAK, WEAK.astype(jnp.float32), id="weak or strong"),
        pytest.param(np.ones((5, 3), np.float64), np.ones((5, 3), np.float32), id="double or not"),
    ],
)
def test_arguments_are_the_same(one: Any, other: Any) -> None:
    assert differing(parts(lambda x: x * 2 + 1, one), parts(lambda x: x * 2 + 1, other)) == set()


def test_number_is_the_array_that_jit_makes_of_it() -> None:
    fun = lambda x, a: x * a  # noqa: E731
    one = parts(fun, XS, 2.5, in_axes=(0, None))
    assert differing(one, parts(fun, XS, jnp.float32(2), in_axes=(0, None))) == set()
    assert differing(one, parts(fun, XS, 7.0, in_axes=(0, None))) == set()


@pytest.mark.parametrize(
    ("one", "other"), [(0, (0,)), (0, (-2,)), (1, (-1,)), ((1,), [1]), (-1, 1)]
)
def test_axes_are_the_same_however_written(one: Any, other: Any) -> None:
    fun = lambda x: x * 2  # noqa: E731
    assert differing(parts(fun, in_axes=one), parts(fun, in_axes=other)) == set()


def test_out_axes_are_the_same_however_written() -> None:
    fun = lambda x: (x, x * 2)  # noqa: E731
    assert differing(parts(fun, out_axes=1), parts(fun, out_axes=(-1, 1))) == set()


# Another program

HELPERS = {
    "another helper": (
        lambda x: jax.jit(lambda y: y + 1)(x), lambda x: jax.jit(lambda y: y - 1)(x)
    ),
    "another literal": (lambda x: x * 2, lambda x: x * 3),
    "a negative zero": (lambda x: x + 0.0, lambda x: x + -0.0),
    "another order": (lambda x: jnp.sin(jnp.cos(x)), lambda x: jnp.cos(jnp.sin(x))),
    "another operand": (lambda x: (y := x * 2) - x + 0 * y, lambda x: x - (y := x * 2) + 0 * y),
    "another output": (lambda x: (x, x + 1), lambda x: (x + 1, x)),
    "one output twice": (lambda x: (x + 1, x + 1), lambda x: [y := x + 1, y]),
    "another parameter": (lambda x: x.sum(keepdims=True), lambda x: x[:1]),
    "another axis inside": (lambda x: x[None].sum(0), lambda x: x[:, None].sum(1)),
    "another cast": (lambda x: x.astype(int), lambda x: x.astype(jnp.int8)),
    "another precision": (
        lambda x: jnp.dot(x, x), lambda x: jnp.dot(x, x, precision="highest")
    ),
    "another constant shape": (
        closing_over(jnp.ones(3)), lambda x: x * jnp.ones((1, 3))[0]
    ),
    "another constant dtype": (
        closing_over(np.ones(3, np.float16).astype("f4")),
        lambda x: x * jnp.ones(3, jnp.float16).astype("f4"),
    ),
    "another custom_jvp": (with_custom_jvp(1.0), with_custom_jvp(2.0)),
    "another custom_vjp": (with_custom_vjp(1.0), with_custom_vjp(2.0)),
    "another callback": (with_callback(lambda x: x + 1), with_callback(lambda x: x + 2)),
    "a callback that calls another": (
        with_callback(lambda x: np.sin(x)), with_callback(lambda x: np.cos(x))
    ),
    "a callback with another inner function": (
        with_callback(lambda x: (lambda y: y + 1)(x)), with_callback(lambda x: (lambda y: y + 2)(x))
    ),
    "another branch": (with_branches(1.0), with_branches(2.0)),
    "another length": (with_loop(3), with_loop(4)),
    "another bound": (with_while(9.0), with_while(8.0)),
    "another rng": (
        lambda x: x + jax.random.normal(jax.random.key(0), (3,)),
        lambda x: x + jax.random.uniform(jax.random.key(0), (3,)),
    ),
    "checkpointed or not": (lambda x: jnp.sin(x), jax.checkpoint(lambda x: jnp.sin(x))),
}  # fmt: skip


@pytest.mark.parametrize("name", HELPERS)
def test_program_differs(name: str) -> None:
    one, other = HELPERS[name]
    assert "program" in differing(parts(one), parts(other))


def double(x: jax.Array) -> jax.Array:
    return 2 * x


@pytest.mark.parametrize(
    ("other", "which"),
    [
        pytest.param(parts(double, np.ones((6, 3), np.float32)), {"arguments", "batch_size"},
                     id="another batch size"),
        pytest.param(parts(double, np.ones((5, 4), np.float32)), {"arguments", "program"},
                     id="another shape"),
        pytest.param(parts(double, np.ones((5, 3), np.int32)), {"arguments", "program"},
                     id="another dtype"),
        pytest.param(parts(double, np.ones((3, 5), np.float32), in_axes=1),
                     {"arguments", "in_axes"}, id="another axis"),
        pytest.param(parts(double, out_axes=1), {"out_axes"}, id="another output axis"),
        pytest.param(parts(double, name="mine"), {"name"}, id="another name"),
        pytest.param(parts(double, XS[:, :3], in_axes=(0,)), set(), id="nothing"),
    ],
)  # fmt: skip
def test_the_part_that_differs_is_named(other: Parts, which: set[str]) -> None:
    assert differing(parts(double), other) == which


def test_unmapped_argument_differs_from_a_mapped_one() -> None:
    fun = lambda a, x: x  # noqa: E731
    one = parts(fun, np.ones(5, np.float32), XS, in_axes=(None, 0))
    other = parts(fun, np.ones(5, np.float32), XS, in_axes=(0, 0))
    assert "in_axes" in differing(one, other)


def test_keywords_are_not_positionals() -> None:
    fun = lambda a, x: x + a  # noqa: E731
    one = parts(fun, XS, XS)
    other = parts(fun, XS, kwargs={"x": XS})
    assert differing(one, other) == set()  # the leaves, in the same order, of the same program


class Thing:
    """A static argument whose printed form holds its address."""


@pytest.mark.parametrize(
    ("one", "other", "which"),
    [
        ("sin", "sin", set()),
        ("sin", "cos", {"statics"}),
        (Thing(), Thing(), set()),
        (Thing(), "Thing", {"statics"}),
        (jnp.sin, jnp.sin, set()),
    ],
)
def test_static_arguments(one: Any, other: Any, which: set[str]) -> None:
    before, after = (parts(lambda x, how: x, XS, how, in_axes=(0, None)) for how in (one, other))
    assert differing(before, after) == which
    assert "0x" not in json.dumps(after)


# Context and software


def test_x64_differs() -> None:
    before = parts(double)
    with jax.enable_x64(True):
        inside = parts(double)
    assert differing(before, inside) == {"x64"}
    with jax.enable_x64(True):
        wide = parts(double, np.ones((5, 3), np.float64))
    assert {"x64", "arguments"} <= differing(before, wide)
    assert differing(before, parts(double)) == set()


def test_matmul_precision_differs() -> None:
    before = parts(double)
    with jax.default_matmul_precision("highest"):
        inside = parts(double)
    assert differing(before, inside) == {"matmul_precision"}
    with jax.default_matmul_precision("bfloat16"):
        assert differing(inside, parts(double)) == {"matmul_precision"}


def test_random_numbers_differ_by_their_settings() -> None:
    before = parts(double)
    with jax.default_prng_impl("rbg"):
        assert differing(before, parts(double)) == {"prng"}
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        assert differing(before, parts(double)) == {"threefry_partitionable"}


def test_xla_flags_differ_but_not_by_order_or_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_b=2")
    before = parts(double)
    monkeypatch.setenv("XLA_FLAGS", "  --xla_b=2   --xla_a=1 ")
    assert differing(before, parts(double)) == set()
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_b=3")
    assert differing(before, parts(double)) == {"xla_flags"}
    monkeypatch.delenv("XLA_FLAGS")
    assert parts(double)["xla_flags"] == []


@pytest.mark.parametrize("part", ["jax", "jaxlib", "schema"])
def test_software_differs(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = parts(double)
    match part:
        case "jax":
            monkeypatch.setattr(jax, "__version__", "9.9.9")
        case "jaxlib":
            monkeypatch.setattr(_key, "version", lambda name: "9.9.9")
        case "schema":
            monkeypatch.setattr(_key, "SCHEMA", 999)
    assert differing(before, parts(double)) == {part}


# Devices


def device(**changed: Any) -> Any:
    actual = jax.devices()[0]
    return SimpleNamespace(
        **{"platform": actual.platform, "device_kind": actual.device_kind} | changed
    )


def test_device_kind_differs() -> None:
    assert differing(device_parts(device()), device_parts(device(device_kind="other"))) == {
        "device_kind"
    }


def test_device_ids_do_not_matter() -> None:
    assert (
        device_parts(device(id=0)) == device_parts(device(id=7)) == device_parts(jax.devices()[0])
    )


def test_processor_and_cores_belong_to_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda platform: {"gpu": 8}.get(platform, 1))
    assert device_parts(device(platform="gpu", device_kind="H200")) == {
        "platform": "gpu",
        "device_kind": "H200",
        "device_count": 8,
    }
    assert {"processor", "cores"} <= set(device_parts(device(platform="cpu")))


@pytest.mark.parametrize(
    ("setting", "value", "part"),
    [("processor", lambda: "other", "processor"), ("usable_cores", lambda: 999, "cores")],
)
def test_processor_and_cores_differ(
    setting: str, value: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = device_parts(device())
    monkeypatch.setattr(_key, setting, value)
    assert differing(before, device_parts(device())) == {part}


@pytest.mark.parametrize(
    "text", ["", "flags : fpu", "model name\t: \n", "model name : unknown", "model name: Unknown\n"]
)
def test_unknown_processor_equals_no_other_machines(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *args, **kwargs: text)
    assert processor.__wrapped__() == f"unknown on {os.uname().nodename}"


def test_processor_without_a_file_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert os.uname().nodename in processor.__wrapped__()


def test_processor_is_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nmodel\t\t: 7\nmodel name\t: Some CPU @ 3 GHz\nmodel name\t: Some CPU\n"
    monkeypatch.setattr(Path, "read_text", lambda *args, **kwargs: text)
    assert processor.__wrapped__() == "Some CPU @ 3 GHz"


def test_device_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_key, "processor", lambda: "Some CPU")
    monkeypatch.setattr(_key, "usable_cores", lambda: 1)
    assert device_in_words(device(platform="cpu")) == "cpu Some CPU, 1 core"
    monkeypatch.setattr(_key, "usable_cores", lambda: 2)
    assert device_in_words(device(platform="cpu")) == "cpu Some CPU, 2 cores"
    assert device_in_words(device(platform="gpu", device_kind="H200")) == "gpu H200"


# Other processes

CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import conftest, test_key
print(json.dumps([
    test_key.digest(test_key.parts(fun)) for pair in test_key.SAME.values() for fun in pair
]))
"""


def test_keys_are_equal_in_another_process() -> None:
    here = [digest(parts(fun)) for pair in SAME.values() for fun in pair]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    printed = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert [json.loads(each) for each in printed] == [here, here]
