"""What identifies a workload: the named parts of its key.

Equal programs have equal keys in every process: no name, address, source line or closed-over value
goes in, so two lambdas of the same arithmetic share one record.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
import os
import re
import types
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import DropVar, Literal

from autobatch._record import SCHEMA
from autobatch._reductions import Reduction
from autobatch._workload import Workload

_UNKNOWN = "unknown"

# Names, debug information, and the derivative rules of custom functions, which a program does not
# run unless it is differentiated; then it holds them. Their printed forms hold addresses.
_IGNORED = {
    "bwd",
    "debug_info",
    "fwd_jaxpr_thunk",
    "jvp_jaxpr_fun",
    "jvp_jaxpr_thunk",
    "name",
    "out_trees",
    "weak_type",
}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def key_parts(workload: Workload, device: Any, *, name: str | None) -> dict[str, Any]:
    """Returns the named parts of the key, as plain JSON data.

    Args:
        workload: the program, its axes and shapes.
        device: the `jax.Device` it runs on.
        name: what the user named it with `name=`, to keep records apart; else None.
    """
    row = workload.row
    assert row is not None
    return {
        "program": program_digest(row.jaxpr),
        "in_axes": list(workload.in_axes),
        "out_axes": [each.value if isinstance(each, Reduction) else each for each in row.out_axes],
        "arguments": [f"{each.dtype}{list(each.shape)}" for each in workload.arguments],
        "batch_size": workload.batch_size,
        "statics": [_static(each) for _, _, each in workload.statics.values],
        "name": name,
        "derivative": _derivative(workload),
        **device_parts(device),
        **software_parts(),
    }


def _derivative(workload: Workload) -> str | list[int | str]:
    if workload.moving is None:
        return "none"
    return [*workload.moving, *(() if workload.rules is None else (f"rules {workload.rules}",))]


def device_parts(device: Any) -> dict[str, Any]:
    """Returns the parts of the key that say where a program runs."""
    parts = {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(device.platform),
    }
    if device.platform == "cpu":
        parts |= {"processor": processor(), "cores": usable_cores()}
    return parts


def software_parts() -> dict[str, Any]:
    """Returns the parts of the key that say what a program is compiled by, in this context."""
    config: Any = jax.config
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "schema": SCHEMA,
        "xla_flags": sorted(os.environ.get("XLA_FLAGS", "").split()),
        "x64": bool(config.jax_enable_x64),
        "matmul_precision": config.jax_default_matmul_precision,
        "prng": str(config.jax_default_prng_impl),
        "threefry_partitionable": bool(config.jax_threefry_partitionable),
    }


@functools.cache
def processor() -> str:
    """Returns the processor's model name; one that is unknown equals no other machine's."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^(?:model name|Processor|CPU part)\s*:\s*(.+)$", text, re.MULTILINE)
    model = match[1].strip() if match else ""
    if not model or model.lower() == _UNKNOWN:
        return f"{_UNKNOWN} on {os.uname().nodename}"
    return model


def usable_cores() -> int:
    """Returns how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_in_words(device: Any) -> str:
    """Returns the device as a person would name it."""
    if device.platform != "cpu":
        return f"{device.platform} {device.device_kind}"
    cores = usable_cores()
    return f"cpu {processor()}, {cores} core{'s' if cores > 1 else ''}"


def program_digest(jaxpr: Any) -> str:
    """Returns a digest of a jaxpr that only its arithmetic decides.

    Variables are numbered in order of appearance, constants stand by shape and dtype, and
    conversions that only change the weak type are left out.
    """
    return _Canonical().jaxpr(jaxpr)


class _Canonical:
    """One walk through a jaxpr; inner jaxprs used more than once are digested once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}
        self._avals: dict[Any, str] = {}

    def jaxpr(self, jaxpr: Any) -> str:
        if id(jaxpr) in self._known:
            return self._known[id(jaxpr)][1]
        lines: list[str] = []
        names: dict[Any, str] = {}
        numbers = itertools.count()
        inner = getattr(jaxpr, "jaxpr", jaxpr)

        def define(var: Any) -> str:
            names[var] = f"v{next(numbers)}"
            return f"{names[var]}:{self.aval(var.aval)}"

        def use(atom: Any) -> str:
            if isinstance(atom, Literal):
                return f"{_plain_array(atom.val)}:{self.aval(atom.aval)}"
            return names[atom]

        lines.append(" ".join(define(var) for var in [*inner.constvars, *inner.invars]))
        for equation in inner.eqns:
            if _only_weakens(equation):
                names[equation.outvars[0]] = use(equation.invars[0])
                continue
            inputs = " ".join(use(atom) for atom in equation.invars)
            parameters = self.value(
                {key: each for key, each in equation.params.items() if key not in _IGNORED}
            )
            outputs = " ".join(
                f"_:{self.aval(var.aval)}" if isinstance(var, DropVar) else define(var)
                for var in equation.outvars
            )
            lines.append(f"{outputs} = {equation.primitive.name}{parameters} {inputs}")
        lines.append(" ".join(use(atom) for atom in inner.outvars))
        text = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        self._known[id(jaxpr)] = (jaxpr, text)
        return text

    def aval(self, aval: Any) -> str:
        """Returns dtype and shape; the same few avals stand on every line."""
        shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
        if shape is None or dtype is None:
            return f"{type(aval).__name__}:{_ADDRESS.sub('', str(aval))}"
        if (shape, dtype) not in self._avals:
            self._avals[shape, dtype] = f"{dtype}{list(shape)}"
        return self._avals[shape, dtype]

    def value(self, value: Any) -> str:
        """Returns a parameter as text without names, addresses or array contents' places."""
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes():
                return repr(value)
            case enum.Enum():
                return f"{type(value).__name__}.{value.name}"
            case np.dtype():
                return value.name
            case Mapping():
                pairs = sorted((str(key), self.value(each)) for key, each in value.items())
                return "{" + ",".join(f"{key}={each}" for key, each in pairs) + "}"
            case set() | frozenset():
                return "{" + ",".join(sorted(self.value(each) for each in value)) + "}"
            case tuple() | list():
                named = type(value).__name__ if hasattr(value, "_fields") else ""
                return named + "(" + ",".join(self.value(each) for each in value) + ")"
            case np.ndarray() | np.generic() | jax.Array():
                return _plain_array(value)
            case functools.partial():
                return "partial" + self.value([value.func, value.args, value.keywords])
            case types.FunctionType():
                return self._code(value.__code__)
            case types.MethodType():
                return self.value(value.__func__)
        if hasattr(value, "eqns"):
            return self.jaxpr(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return type(value).__name__ + self.value(fields)
        if hasattr(value, "__qualname__"):
            return value.__qualname__
        return type(value).__name__ + ":" + _ADDRESS.sub("", str(value))

    def _code(self, code: types.CodeType) -> str:
        """Returns a digest of a callback, which no jaxpr shows: of what it does, not its name."""
        constants = [
            self._code(each) if isinstance(each, types.CodeType) else self.value(each)
            for each in code.co_consts
        ]
        text = repr((code.co_code.hex(), constants, code.co_names))
        return "code:" + hashlib.sha256(text.encode()).hexdigest()


def _only_weakens(equation: Any) -> bool:
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = equation.invars[0].aval, equation.outvars[0].aval
    return before.dtype == after.dtype and equation.params.get("sharding") is None


def _static(value: Any) -> str:
    """Returns a static argument without address; what an object does stands in the program."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return repr(value)
    return type(value).__qualname__


def _plain_array(value: Any) -> str:
    """Returns a literal's dtype, shape and content."""
    if isinstance(value, bool | int | float | complex):
        return repr(value)
    array = np.asarray(value)
    if array.size == 1:
        return f"{array.dtype}{list(array.shape)}{array.tolist()!r}"
    return f"{array.dtype}{list(array.shape)}{hashlib.sha256(array.tobytes()).hexdigest()}"
