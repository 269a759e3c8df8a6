"""Where a call would run, and whether it may touch its arrays now. Memory is in `_memory`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.core
import jax.extend.backend
import jax.extend.core
from jax.sharding import AxisType


def device_of(leaves: Iterable[Any]) -> Any:
    """Returns the `jax.Device` that a call with these leaves runs on, as jit decides it."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed:
            return min(leaf.devices(), key=lambda each: each.id)
    config: Any = jax.config
    default = config.jax_default_device
    if default is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=default)[0] if isinstance(default, str) else default


@functools.cache
def several_kinds() -> bool:
    """Returns whether this process sees devices of more than one kind."""
    return len({each.device_kind for each in _all_devices()}) > 1


def _all_devices() -> list[Any]:
    return [
        device
        for name in jax.extend.backend.backends()
        for device in jax.local_devices(backend=name)
    ]


def several_devices(leaves: Iterable[Any]) -> bool:
    """Returns whether one of the arrays lies on more than one device."""
    return any(
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and len(leaf.devices()) > 1
        for leaf in leaves
    )


def is_sharding_in_force() -> bool:
    """Returns whether `jax.set_mesh` says how arrays made here are spread over devices."""
    return spreads(jax.sharding.get_abstract_mesh())


def spreads(mesh: Any) -> bool:
    """Returns whether values under this mesh may lie on several devices.

    Inside `shard_map` over all axes, a value is what one device holds. An explicit axis counts also
    if it has one device, since it is part of types.
    """
    kinds = set(mesh.axis_types) - {AxisType.Manual}
    return AxisType.Explicit in kinds or (bool(kinds) and mesh.size > 1)


def has_mesh(aval: Any) -> bool:
    """Returns whether a loop over this value could gather it from several devices."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty and spreads(mesh)


def is_inside_shard_map() -> bool:
    """Returns whether code runs per device, over some axis of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(each == AxisType.Manual for each in mesh.axis_types)


@functools.cache
def several_local_devices() -> bool:
    """Returns whether this process has several devices to spread an array over."""
    return jax.local_device_count() > 1


def under_trace(leaves: Iterable[Any]) -> bool:
    """Returns whether a call happens inside a transformation, where nothing may be measured.

    That is so even if all arguments are concrete: what the function closes over may be traced.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return True
    with jax.core.eval_context():
        top = _current_trace()
    return _current_trace() is not top


def is_abstract(leaves: Iterable[Any]) -> bool:
    """Returns whether a call has shapes, or traced values, instead of arrays."""
    leaves = list(leaves)
    return under_trace(leaves) or any(isinstance(each, jax.ShapeDtypeStruct) for each in leaves)


def _current_trace() -> Any:
    with jax.extend.core.take_current_trace() as trace:
        return trace
