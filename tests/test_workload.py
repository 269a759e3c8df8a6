"""A call is described as `jax.vmap` understands it: same errors, same axes, one trace of `fun`."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import described, program

from autobatch._leaves import split
from autobatch._workload import MapSpec, Workload, describe, equations

Point = namedtuple("Point", ["x", "y"])


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


# Tracing


def test_fun_is_traced_once() -> None:
    traces: list[tuple[int, ...]] = []

    def fun(x: jax.Array, y: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return x @ y

    described(fun, ones(3, 5, 4), ones(4), in_axes=(1, None))
    assert traces == [(3, 4)]


def test_nothing_is_computed(count_compiles: Callable[[], int]) -> None:
    xs = ones(5, 3)
    before = count_compiles()
    described(lambda x: jnp.sin(x).sum(), xs)
    assert count_compiles() == before


def test_shapes_are_enough() -> None:
    _, statics = split((ones(5, 2),), {})
    shape = jax.ShapeDtypeStruct((5, 2), np.float32)
    workload = describe(MapSpec(fun=lambda x: x + 1), [shape], statics)
    assert workload.batch_size == 5
    assert workload.arguments == (shape,)


def test_arguments_may_be_traced() -> None:
    found: list[Workload] = []

    @jax.jit
    def outer(xs: jax.Array) -> jax.Array:
        found.append(described(lambda x: x + 1, xs, in_axes=-1))
        return xs

    outer(ones(5, 2))
    assert (found[0].batch_size, found[0].in_axes) == (2, (1,))


def test_closed_over_arrays_are_constants_not_literals() -> None:
    table = jnp.arange(6.0)
    workload = described(lambda i: table[i], np.arange(5))
    assert [each.shape for each in workload.consts] == [(6,)]
    assert workload.row is not None
    assert workload.row.in_axes == (None, 0)


def test_outputs_of_one_example() -> None:
    workload = described(lambda x: (x.sum(), {"a": x}), ones(5, 3))
    assert workload.row is not None
    assert [each.aval.shape for each in workload.row.jaxpr.outvars] == [(), (3,)]
    assert workload.out_tree == jax.tree.structure((0, {"a": 0}))


def test_equations_include_inner_ones() -> None:
    def fun(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x > 0, jax.jit(jnp.sin), lambda y: jax.lax.cos(y), x)

    row = described(fun, ones(5)).row
    assert row is not None
    names = {each.primitive.name for each in equations(row.jaxpr)}
    assert {"sin", "cos", "cond", "gt"} <= names


def test_serves_the_same_shapes_only() -> None:
    workload = described(lambda x, y: x + y, ones(5), ones(5))
    statics = workload.statics
    assert workload.serves([ones(5), ones(5)], statics)
    assert not workload.serves([ones(5), ones(6)], statics)
    assert not workload.serves([ones(5), np.ones(5, np.int32)], statics)
    assert not workload.serves(*split((ones(5),), {"y": ones(5)}))


# Misuse


class Misuse:
    """A call that `jax.vmap` refuses."""

    def __init__(self, fun: Callable[..., Any], *args: Any, **options: Any) -> None:
        self.fun, self.args, self.kwargs = fun, args, options.pop("kwargs", {})
        self.options = options


def identity(x: Any) -> Any:
    return x


def pair(x: Any, y: Any) -> Any:
    return x, y


MISUSES = {
    "in_axes too long": Misuse(identity, ones(5), in_axes=(0, 0)),
    "in_axes too short": Misuse(pair, ones(5), ones(5), in_axes=(0,)),
    "in_axes a bare dict": Misuse(identity, {"a": ones(5)}, in_axes={"a": 0}),
    "in_axes a text": Misuse(identity, ones(5), in_axes="0"),
    "in_axes a float": Misuse(identity, ones(5), in_axes=0.0),
    "in_axes a float inside": Misuse(identity, ones(5), in_axes=(0.0,)),
    "in_axes a boolean": Misuse(identity, ones(5, 5), in_axes=True),
    "in_axes a boolean inside": Misuse(identity, ones(5, 5), in_axes=(True,)),
    "in_axes of another tree": Misuse(identity, {"a": ones(5)}, in_axes=({"b": 0},)),
    "in_axes deeper than the tree": Misuse(identity, ones(5), in_axes=((0, 0),)),
    "in_axes beyond the rank": Misuse(identity, ones(5), in_axes=1),
    "in_axes below the rank": Misuse(identity, ones(5), in_axes=-2),
    "nothing mapped, no size": Misuse(identity, ones(5), in_axes=None),
    "nothing mapped inside, no size": Misuse(pair, ones(5), ones(5), in_axes=(None, None)),
    "no arguments": Misuse(lambda: 1.0),
    "empty arguments": Misuse(identity, {}),
    "arguments of None": Misuse(identity, None),
    "unequal sizes": Misuse(pair, ones(5), ones(6)),
    "unequal sizes in a tree": Misuse(identity, {"a": ones(5), "b": ones(6)}),
    "unequal sizes of keywords": Misuse(pair, ones(5), kwargs={"y": ones(6)}),
    "other axis_size": Misuse(identity, ones(5), axis_size=6),
    "negative axis_size": Misuse(identity, ones(5), axis_size=-5),
    "scalar mapped": Misuse(identity, np.float32(1)),
    "number mapped": Misuse(identity, 1.0),
    "scalar among mapped": Misuse(pair, ones(5), 2.0),
    "keyword scalar mapped": Misuse(pair, ones(5), in_axes=0, kwargs={"y": 2.0}),
    "text mapped": Misuse(identity, "text"),
    "object mapped": Misuse(pair, ones(5), object()),
    "out_axes of another tree": Misuse(pair, ones(5), ones(5), out_axes=(0,)),
    "out_axes of another node": Misuse(pair, ones(5), ones(5), out_axes=[0, 0]),
    "out_axes deeper than the tree": Misuse(identity, ones(5), out_axes=(0, 0)),
    "out_axes beyond the rank": Misuse(identity, ones(5, 3), out_axes=2),
    "out_axes below the rank": Misuse(identity, ones(5, 3), out_axes=-3),
    "out_axes a text": Misuse(identity, ones(5), out_axes="0"),
    "out_axes a float": Misuse(identity, ones(5), out_axes=0.0),
    "out_axes None for a mapped output": Misuse(identity, ones(5), out_axes=None),
    "out_axes None for one of two": Misuse(pair, ones(5), ones(5), out_axes=(0, None)),
    "out_axes None inside a call": Misuse(jax.jit(jnp.sin), ones(5), out_axes=None),
    "result no array": Misuse(lambda x: "text", ones(5)),
    "result an object": Misuse(lambda x: object(), ones(5)),
    "too many arguments": Misuse(identity, ones(5), ones(5)),
    "error of fun": Misuse(lambda x: {}["missing"], ones(5)),
    "shape error of fun": Misuse(lambda x, y: x @ y, ones(5, 3), ones(5, 4)),
    "value needed by fun": Misuse(lambda x: x if x > 0 else -x, ones(5)),
    "number needed by fun": Misuse(lambda x: float(x), ones(5)),
}


@pytest.mark.parametrize("strategy", ["vmap", "map", "chunked:2", "unrolled"])
@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_misuse_raises_what_vmap_raises(misuse: Misuse, strategy: str) -> None:
    with pytest.raises(Exception) as bare:  # noqa: PT011  whatever it is
        jax.vmap(misuse.fun, **misuse.options)(*misuse.args, **misuse.kwargs)
    with pytest.raises(bare.type) as ours:
        program(strategy, misuse.fun, **misuse.options).trace(*misuse.args, **misuse.kwargs)
    assert ours.type is bare.type


# Only the mapping itself shows which outputs are batched.
@pytest.mark.parametrize("name", [each for each in MISUSES if not each.startswith("out_axes None")])
def test_describing_raises_before_anything_is_mapped(name: str) -> None:
    misuse = MISUSES[name]
    with pytest.raises(Exception) as bare:  # noqa: PT011  whatever it is
        jax.vmap(misuse.fun, **misuse.options)(*misuse.args, **misuse.kwargs)
    with pytest.raises(bare.type):
        described(misuse.fun, *misuse.args, **misuse.options, kwargs=misuse.kwargs)


def test_names_of_arguments_stand_in_messages() -> None:
    def fun(image: Any, label: Any) -> Any:
        return image, label

    with pytest.raises(ValueError, match=r"argument args\[0\]|image") as caught:
        described(fun, ones(5), ones(6))
    assert "image" in str(caught.value)
    assert "label" in str(caught.value)


# Axes


@pytest.mark.parametrize(
    ("args", "in_axes", "flat"),
    [
        pytest.param((ones(5), ones(5)), 0, (0, 0), id="one axis for all"),
        pytest.param((ones(2, 5), ones(5)), (-1, 0), (1, 0), id="negative"),
        pytest.param((ones(2, 3, 5), ones(5, 2)), (-1, -2), (2, 0), id="both negative"),
        pytest.param((ones(2), ones(5)), (None, 0), (None, 0), id="unmapped"),
        pytest.param((ones(2), ones(5)), [None, 0], (None, 0), id="a list"),
        pytest.param(
            ({"a": ones(5), "b": ones(2)},), ({"a": 0, "b": None},), (0, None), id="a dict"
        ),
        pytest.param(
            ({"b": ones(2), "a": ones(5)},), ({"b": None, "a": 0},), (0, None), id="sorted keys"
        ),
        pytest.param(
            (ones(2), (ones(5), ones(3))), (None, (0, None)), (None, 0, None), id="nested"
        ),
        pytest.param(
            ({"a": (ones(5), ones(5)), "b": ones(2)},), ({"a": 0, "b": None},), (0, 0, None),
            id="a prefix of a dict",
        ),
        pytest.param((Point(ones(5), ones(2)),), (Point(0, None),), (0, None), id="namedtuple"),
        pytest.param((Point(ones(2, 5), ones(3, 5)),), 1, (1, 1), id="prefix of a namedtuple"),
        pytest.param(([ones(5), None, ones(5)],), 0, (0, 0), id="None leaf"),
        pytest.param(({"a": None, "b": ones(5)},), ({"a": 0, "b": 0},), (0,), id="axis of None"),
        pytest.param(
            ({"a": None, "b": ones(5)},), ({"a": None, "b": 0},), (0,), id="None for None"
        ),
        pytest.param(
            (OrderedDict(z=ones(5), a=ones(2)),), (OrderedDict(z=0, a=None),), (0, None),
            id="ordered dict",
        ),
        pytest.param((ones(5), 2.5, 3), (0, None, None), (0, None, None), id="numbers"),
    ],
)  # fmt: skip
def test_each_leaf_has_its_axis(args: Any, in_axes: Any, flat: tuple[int | None, ...]) -> None:
    workload = described(lambda *args: 1, *args, in_axes=in_axes)
    assert workload.in_axes == flat
    assert workload.batch_size == 5


def test_keywords_are_mapped_on_axis_0() -> None:
    workload = described(
        lambda x, *, a, b: x, ones(2), in_axes=(None,), kwargs={"b": ones(5, 1), "a": ones(5)}
    )
    assert workload.in_axes == (None, 0, 0)
    assert workload.statics.tree == jax.tree.structure(((0,), {"a": 0, "b": 0}))
    assert [each.shape for each in workload.arguments] == [(2,), (5,), (5, 1)]


@pytest.mark.parametrize(
    ("out_axes", "flat"),
    [
        (0, (0, 0, 0)),
        (-1, (2, 0, 1)),
        ((1, 0), (1, 0, 0)),
        ((-2, {"a": 0, "b": -1}), (1, 0, 1)),
        ((0, {"a": None, "b": 0}), (0, None, 0)),
        (None, (None, None, None)),
        ((None, {"a": None, "b": -2}), (None, None, 0)),
    ],
)
def test_each_output_has_its_axis(out_axes: Any, flat: tuple[int | None, ...]) -> None:
    def fun(x: jax.Array) -> Any:
        return jnp.ones((2, 3)), {"a": jnp.ones(()), "b": jnp.ones(4)}

    row = described(fun, ones(5), out_axes=out_axes).row
    assert row is not None
    assert row.out_axes == flat


def test_none_in_the_result_is_no_output() -> None:
    workload = described(lambda x: (None, x), ones(5), out_axes=(None, 0))
    assert workload.row is not None
    assert workload.row.out_axes == (0,)
    assert jax.tree.unflatten(workload.out_tree, [7]) == (None, 7)


@pytest.mark.parametrize("size", [0, 1, 5])
def test_size_may_be_given_instead(size: int) -> None:
    workload = described(identity, ones(3), in_axes=None, axis_size=size)
    assert workload.batch_size == size
    assert workload.row is not None
    assert not workload.row.is_mapped


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        (np.ones(5, np.int8), "int8"),
        (np.ones(5, bool), "bool"),
        (jnp.ones(5, jnp.bfloat16), "bfloat16"),
        (np.ones(5, np.complex64), "complex64"),
        (np.ones(5, np.float64), "float32"),  # as jit takes it while x64 is off
        (jax.random.split(jax.random.key(0), 5), "key<fry>"),
    ],
)
def test_dtypes_are_those_that_jit_sees(leaf: Any, dtype: str) -> None:
    assert [str(each.dtype) for each in described(identity, leaf).arguments] == [dtype]


@pytest.mark.parametrize(("number", "dtype"), [(2, "int32"), (2.5, "float32"), (True, "bool")])
def test_python_numbers_are_arrays(number: Any, dtype: str) -> None:
    workload = described(lambda x, y: x, ones(5), number, in_axes=(0, None))
    assert [str(each.dtype) for each in workload.arguments] == ["float32", dtype]
    assert workload.arguments[1].shape == ()
