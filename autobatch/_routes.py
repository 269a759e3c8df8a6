"""Which callable serves a call, told at the least cost: by the shape of its first mapped array.

One known shape goes straight to its jit object; several, over a table on that shape, which costs
less than half a microsecond.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core

from autobatch._devices import several_kinds, several_local_devices
from autobatch._workload import Workload

Serve = Callable[..., Any]


class Routes:
    """The callables that serve the calls of one form."""

    def __init__(self, unserved: Serve) -> None:
        """Makes an empty table.

        Args:
            unserved: what serves a call that is not in it.
        """
        self._unserved = unserved
        self._table: dict[Any, Serve] = {}
        self._probe: Callable[[Any, Any], Any] | None = None

    def entered(self, workload: Workload, args: Any, kwargs: Any, serve: Serve | None) -> Serve:
        """Returns what serves all calls from now on, with a callable for those like this one.

        Args:
            workload: the described call.
            args: its positional arguments.
            kwargs: its keyword arguments.
            serve: what serves it; None for a call inside a trace, which changes nothing.
        """
        if self._probe is None:
            self._probe = _probe(workload, args, kwargs)
        key = self._key_of(args, kwargs)
        if serve is None:
            serve = self._table.get(key, self._unserved)
        self._table[key] = serve
        if len(self._table) == 1 and not several_kinds() and not several_local_devices():
            return serve
        return self._by_shape()

    def _by_shape(self) -> Serve:
        table, probe, unserved, key_of = self._table, self._probe, self._unserved, self._key_of
        assert probe is not None
        if several_kinds() or several_local_devices():  # these need more than a shape
            return lambda *args, **kwargs: table.get(key_of(args, kwargs), unserved)(
                *args, **kwargs
            )

        def serve(*args: Any, **kwargs: Any) -> Any:
            try:
                target = table[probe(args, kwargs).shape]
            except Exception:  # other arguments than those known, or none to look at
                target = unserved
            return target(*args, **kwargs)

        return serve

    def _key_of(self, args: Any, kwargs: Any) -> Any:
        """Returns what a call is looked up by: the first mapped argument's shape.

        With several kinds of devices also where it lies, since jit would take one trace for all;
        with several devices of a kind nothing if it is traced, since its sharding is not known.
        """
        assert self._probe is not None
        try:
            leaf = self._probe(args, kwargs)
            shape = leaf.shape
        except Exception:  # other arguments than those known, or none to look at
            return None
        if several_local_devices() and isinstance(leaf, jax.core.Tracer):
            return None
        return (shape, getattr(leaf, "device", None)) if several_kinds() else shape

    def found(self, args: Any, kwargs: Any) -> Serve | None:
        """Returns what has been put into service for a call, such as by another thread, or None."""
        if self._probe is None:
            return None
        target = self._table.get(self._key_of(args, kwargs))
        return None if target == self._unserved else target


def _probe(workload: Workload, args: Any, kwargs: Any) -> Callable[[Any, Any], Any]:
    """Returns a function that picks the first mapped array out of `(args, kwargs)`."""
    static = {position for position, _, _ in workload.statics.values}
    found = jax.tree_util.tree_leaves_with_path((args, kwargs))
    found = [each for position, each in enumerate(found) if position not in static]
    for (path, leaf), axis in zip(found, workload.in_axes, strict=True):
        if axis is not None:
            return _reaching(path, leaf, args, kwargs)
    return _nothing


def _reaching(path: Any, leaf: Any, args: Any, kwargs: Any) -> Callable[[Any, Any], Any]:
    """Returns a function that follows a path; one that finds nothing where that fails."""
    match path:
        case (jax.tree_util.SequenceKey(idx=0), jax.tree_util.SequenceKey(idx=index)):
            return lambda args, kwargs: args[index]
    probe = functools.partial(_walk, path[0].idx, [_step(each) for each in path[1:]])
    try:
        return probe if probe(args, kwargs) is leaf else _nothing
    except Exception:  # a user's node may do as it likes where its leaf is looked for
        return _nothing


def _nothing(args: Any, kwargs: Any) -> None:
    return None


def _step(key: Any) -> Callable[[Any], Any]:
    match key:
        case jax.tree_util.GetAttrKey(name=name):
            return lambda node: getattr(node, name)
        case jax.tree_util.SequenceKey(idx=place) | jax.tree_util.DictKey(key=place):
            return lambda node: node[place]
    return lambda node: None  # a registered node that does not say how to reach into it


def _walk(which: int, steps: list[Callable[[Any], Any]], args: Any, kwargs: Any) -> Any:
    node = kwargs if which else args
    for step in steps:
        node = step(node)
    return node
