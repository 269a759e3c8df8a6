"""The decorator and what it returns: binding, dispatch, `plan`, `explain`, `tune`, `lower`.

A call goes to a jit object, whose own cache is the dispatch table. Each tuned plan has its own jit
object, because the winner's executable lives on the one that it was compiled on; everything else
shares one. A signature without a plan makes jit trace, the trace finds none and unwinds to the
call, which still holds the arguments, tunes on them, and puts the winner's object into service.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

import jax
import jax.stages

from autobatch import _report
from autobatch._choose import Budget, Plan, blank
from autobatch._devices import device_of, several_kinds, under_trace
from autobatch._key import device_in_words
from autobatch._planner import Mode, Planned, Planner, checked_mode
from autobatch._program import Program, Unplanned
from autobatch._strategies import VMAP, Strategy
from autobatch._workload import MapSpec, Workload, describe

P = ParamSpec("P")
R = TypeVar("R")


@overload
def autobatch(
    fun: Callable[P, R],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    *,
    budget: Budget | None = None,
    strategy: str | Strategy | None = None,
    tune: Mode | None = None,
    store: str | os.PathLike[str] | bool | None = None,
    name: str | None = None,
) -> BatchedFunction[P, R]: ...


@overload
def autobatch(
    fun: None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    *,
    budget: Budget | None = None,
    strategy: str | Strategy | None = None,
    tune: Mode | None = None,
    store: str | os.PathLike[str] | bool | None = None,
    name: str | None = None,
) -> Callable[[Callable[P, R]], BatchedFunction[P, R]]: ...


def autobatch(
    fun: Callable[P, R] | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    *,
    budget: Budget | None = None,
    strategy: str | Strategy | None = None,
    tune: Mode | None = None,
    store: str | os.PathLike[str] | bool | None = None,
    name: str | None = None,
) -> BatchedFunction[P, R] | Callable[[Callable[P, R]], BatchedFunction[P, R]]:
    """Returns `fun` mapped over a batch, with the meaning of `jax.jit(jax.vmap(fun))`.

    How the batch is mapped is measured on the first call of every shape, on its real arrays, and
    remembered on disk. From then on a call is a `jax.jit` call.

    Args:
        fun: the function of one example. Left out, a decorator with these options is returned.
        in_axes: the mapped axis of each positional argument, or None, as `jax.vmap` takes them;
            keyword arguments of the call are mapped on axis 0.
        out_axes: where the batch axis stands in each output, as `jax.vmap` takes them.
        axis_name: name of the batch axis for collectives.
        axis_size: rows of the batch, for a call without a mapped argument.
        spmd_axis_name: as `jax.vmap` takes it.
        budget: limits on memory, compile and tuning time, and the calls that a compile is spread
            over; default `Budget()`.
        strategy: forces `"vmap"`, `"map"`, `"chunked:K"` (K rows at a time, `lax.map`'s
            `batch_size`) or `"unrolled"`: no tuning, no memory gate.
        tune: `"first-call"` (default), `"cached"` (the record, else `vmap`; never measures),
            `"require"` (no record is an error), `"force"` (measures again, once per signature) or
            `"off"` (plain `jax.jit(jax.vmap(fun))`). None reads `AUTOBATCH_TUNE`.
        store: folder of the records; None is the default folder, False keeps none.
        name: keeps this function's records apart from those of the same program on other data.

    Returns:
        A `BatchedFunction`, or a decorator that makes one.

    Raises:
        ValueError: an option is none of those allowed; the message names them.
        TypeError: what `jax.vmap` raises for `in_axes` or `fun`.

    >>> import jax.numpy as jnp
    >>> double = autobatch(lambda x: 2 * x, strategy="chunked:2")
    >>> double(jnp.arange(3)).tolist()
    [0, 2, 4]
    """

    def decorate(function: Callable[P, R]) -> BatchedFunction[P, R]:
        spec = MapSpec(
            fun=function,
            in_axes=in_axes,
            out_axes=out_axes,
            axis_name=axis_name,
            axis_size=axis_size,
            spmd_axis_name=spmd_axis_name,
        )
        if budget is not None and not isinstance(budget, Budget):
            raise ValueError(f"budget must be an autobatch.Budget; got {budget!r}")
        planner = Planner(
            name=name or getattr(function, "__name__", type(function).__name__),
            key_name=name,
            budget=budget or Budget(),
            strategy=Strategy.parse(strategy) if isinstance(strategy, str) else strategy,
            mode=None if tune is None else checked_mode(tune),
            store=store,
        )
        return BatchedFunction(spec, planner)

    return decorate if fun is None else decorate(fun)


class BatchedFunction(Generic[P, R]):
    """A function mapped over a batch; what `autobatch` returns. Call it as `jax.vmap(fun)`."""

    def __init__(self, spec: MapSpec, planner: Planner) -> None:
        self._spec, self._planner = spec, planner
        self._plain = spec.vmapped(spec.fun)  # vmap's own errors for wrong axes come from here
        functools.update_wrapper(self, spec.fun, updated=())
        self._lock = threading.RLock()
        self._serve: Callable[..., Any] = self._unserved
        self._table: dict[Any, Callable[..., Any]] = {}
        self._probe: Callable[[Any, Any], Any] | None = None
        self._tuned_programs: dict[str, Program] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns `jax.vmap(fun)(*args, **kwargs)`; tunes if there is no plan for these shapes.

        Raises:
            ValueError, TypeError: what `jax.vmap` raises for this call.
            NoViableStrategyError: nothing fits the memory that the budget allows.
            RecordMissError: `tune="require"`, and there is no record.
        """
        try:
            return self._serve(*args, **kwargs)
        except Unplanned as unplanned:
            workload = unplanned.workload
        return self._settled(workload, args, kwargs)

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Returns the plan for these shapes; tunes if there is none. Does not run the function.

        Raises:
            ValueError, TypeError: what `jax.vmap` raises for this call.
            NoViableStrategyError: nothing fits the memory that the budget allows.
            RecordMissError: `tune="require"`, and there is no record.
        """
        return self._planned(args, kwargs)[1].plan

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Returns a table of every candidate for these shapes; tunes if there is no plan.

        Raises:
            ValueError, TypeError: what `jax.vmap` raises for this call.
            NoViableStrategyError: nothing fits the memory that the budget allows.
            RecordMissError: `tune="require"`, and there is no record.
        """
        workload, planned, _ = self._planned(args, kwargs)
        if planned.record is not None and planned.limits is not None:
            return _report.explain(planned.record, planned.plan, planned.limits)
        return _report.explain_unmeasured(
            planned.plan,
            name=self._planner.name,
            batch_size=workload.batch_size,
            device=device_in_words(device_of(jax.tree.leaves((args, kwargs)))),
            versions=f"jax {jax.__version__}",
        )

    def tune(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Measures again on these arrays, replaces the record, and returns the new plan.

        Raises:
            ValueError, TypeError: what `jax.vmap` raises for this call, and for traced arguments.
            NoViableStrategyError: nothing fits the memory that the budget allows.
        """
        if under_trace(jax.tree.leaves((args, kwargs))):
            raise TypeError(
                f"`{self._planner.name}.tune(...)` measures on concrete arrays, and was called "
                "inside a JAX transformation; call it before the transformed function"
            )
        return self._planned(args, kwargs, anew=True)[1].plan

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Returns the chosen program for these shapes, lowered; tunes if there is no plan.

        Raises:
            ValueError, TypeError: what `jax.vmap` raises for this call.
            NoViableStrategyError: nothing fits the memory that the budget allows.
            RecordMissError: `tune="require"`, and there is no record.
        """
        return self._planned(args, kwargs)[2].lower(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<autobatch of {self._planner.name}>"

    # What follows happens once per signature.

    def _unserved(self, *args: Any, **kwargs: Any) -> Any:
        """Serves a call of which nothing is known."""
        if self._is_off():
            self._serve = self._off
        elif under_trace(jax.tree.leaves((args, kwargs))):
            return self._traced.jitted(*args, **kwargs)
        else:
            with self._lock:  # another thread may have settled this call meanwhile
                if not self._is_served(args, kwargs):
                    return self._settled(describe(self._spec, args, kwargs), args, kwargs)
        return self(*args, **kwargs)

    def _settled(self, workload: Workload, args: Any, kwargs: Any) -> Any:
        """Serves a described call without a plan, and puts a program into service for the next."""
        leaves = jax.tree.leaves((args, kwargs))
        if under_trace(leaves):
            self._enter(workload, args, kwargs, self._unserved)
            return self._traced.jitted(*args, **kwargs)
        with self._lock:
            program = self._program(workload, args, kwargs)[1]
        return program(*args, **kwargs)

    def _planned(
        self, args: Any, kwargs: Any, *, anew: bool = False
    ) -> tuple[Workload, Planned, Any]:
        """Returns the described call, its plan, and the jit object that serves it."""
        workload = describe(self._spec, args, kwargs)
        if self._is_off():
            plan = Plan(strategy=VMAP, source="off", outcomes=blank("tuning is off"), key="")
            return workload, Planned(plan=plan), self._off
        leaves = jax.tree.leaves((args, kwargs))
        if under_trace(leaves):
            planned = self._planner.known(workload, leaves, device_of(leaves), may_tune=False)
            assert planned is not None
            return workload, planned, self._traced.jitted
        with self._lock:
            return workload, *self._program(workload, args, kwargs, anew=anew)

    def _program(
        self, workload: Workload, args: Any, kwargs: Any, *, anew: bool = False
    ) -> tuple[Planned, Any]:
        """Returns the plan and the jit object in service for a concrete call; tunes if needed."""
        leaves = jax.tree.leaves((args, kwargs))
        device = device_of(leaves)
        planned = self._planner.known(workload, leaves, device, may_tune=True)
        if planned is None or (anew and planned.record is not None):
            planned = self._planner.tuned(
                workload,
                args,
                kwargs,
                device,
                lambda: Program(self._spec, self._resolver(device)),
                anew=anew,
            )
            if planned.program is not None:
                self._tuned_programs[planned.plan.key] = planned.program
        program = self._tuned_programs.get(planned.plan.key)
        if program is None:
            program = self._common(device)
            program.prepare(workload, planned.plan.strategy)
            program.jitted.trace(*args, **kwargs)  # which the call itself then need not do
            program.release()
        self._enter(workload, args, kwargs, program.jitted)
        return planned, program.jitted

    def _resolver(self, device: Any) -> Callable[[Workload, list[Any]], Strategy]:
        def resolve(workload: Workload, leaves: list[Any]) -> Strategy:
            planned = self._planner.known(workload, leaves, device, may_tune=True)
            if planned is None:
                raise Unplanned(workload)
            return planned.plan.strategy

        return resolve

    @functools.cached_property
    def _traced(self) -> Program:
        """Serves calls inside other traces, where nothing can be measured.

        It is apart from the others: an estimate made there must not serve a concrete call.
        """

        def resolve(workload: Workload, leaves: list[Any]) -> Strategy:
            device = device_of(())
            planned = self._planner.known(workload, leaves, device, may_tune=False)
            assert planned is not None
            return planned.plan.strategy

        return Program(self._spec, resolve)

    @functools.cached_property
    def _common_programs(self) -> dict[Any, Program]:
        return {}

    def _common(self, device: Any) -> Program:
        """Returns the program of a device that serves what was not tuned on a program of its own.

        jit would take one trace for all devices, and the plan with it.
        """
        if device not in self._common_programs:
            self._common_programs[device] = Program(self._spec, self._resolver(device))
        return self._common_programs[device]

    @functools.cached_property
    def _off(self) -> Any:
        return jax.jit(self._plain)

    def _is_off(self) -> bool:
        return self._planner.strategy is None and self._planner.tuning_mode() == "off"

    # Dispatch. One known shape goes straight to its jit object; several, over a table on the shape
    # of the first mapped argument, which costs less than half a microsecond.

    def _enter(self, workload: Workload, args: Any, kwargs: Any, serve: Callable[..., Any]) -> None:
        """Puts a callable into service for calls like this one."""
        if self._probe is None:
            self._probe = _probe(workload, args, kwargs)
        key = self._table_key(args, kwargs)
        self._table[key] = serve
        if len(self._table) == 1 and not several_kinds():
            self._serve = serve
        else:
            self._serve = self._by_shape()

    def _by_shape(self) -> Callable[..., Any]:
        table, probe, unserved = self._table, self._probe, self._unserved
        if several_kinds():
            key_of = self._table_key

            def serve(*args: Any, **kwargs: Any) -> Any:
                return table.get(key_of(args, kwargs), unserved)(*args, **kwargs)

        else:

            def serve(*args: Any, **kwargs: Any) -> Any:
                try:
                    target = table[probe(args, kwargs).shape]  # pyright: ignore[reportOptionalCall]
                except (LookupError, AttributeError, TypeError):
                    target = unserved
                return target(*args, **kwargs)

        return serve

    def _table_key(self, args: Any, kwargs: Any) -> Any:
        try:
            leaf = cast(Callable[[Any, Any], Any], self._probe)(args, kwargs)
            if not several_kinds():
                return leaf.shape
            return leaf.shape, device_of(jax.tree.leaves((args, kwargs)))
        except (LookupError, AttributeError, TypeError):
            return None

    def _is_served(self, args: Any, kwargs: Any) -> bool:
        return self._probe is not None and self._table_key(args, kwargs) in self._table


def _probe(workload: Workload, args: Any, kwargs: Any) -> Callable[[Any, Any], Any]:
    """Returns a function that picks the first mapped leaf out of `(args, kwargs)`."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path((args, kwargs))]
    mapped = [path for path, axis in zip(paths, workload.in_axes, strict=True) if axis is not None]
    match mapped[0] if mapped else ():
        case (jax.tree_util.SequenceKey(idx=0), jax.tree_util.SequenceKey(idx=index)):
            return lambda args, kwargs: args[index]
        case (jax.tree_util.SequenceKey(idx=which), *steps):
            return functools.partial(_walk, which, [_step(each) for each in steps])
    return lambda args, kwargs: None


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
