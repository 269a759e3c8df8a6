"""Which jit object serves which call.

A call goes to a jit object, whose own cache is the dispatch table. Each tuned plan has its own jit
object, because the winner's executable lives on the one that it was compiled on; everything else
shares one. A signature without a plan makes jit trace, the trace finds none and unwinds to the
call, which still holds the arguments, tunes on them, and puts the winner's object into service.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.core

from autobatch._choose import Plan, blank
from autobatch._devices import device_of, several_kinds, several_local_devices, under_trace
from autobatch._leaves import Form, Statics, form_of, split
from autobatch._planner import Planned, Planner
from autobatch._program import Donation, Program, Resolve, Unplanned, jit_object
from autobatch._strategies import VMAP, Strategy
from autobatch._workload import MapSpec, Workload, describe

Serve = Callable[..., Any]


class Dispatcher:
    """Serves all calls of one mapped function.

    Attributes:
        serve: takes a call, at the speed of jit where its signature is known. It raises
            `Unplanned` for a signature that is not; then `settled` serves the call.
    """

    def __init__(self, spec: MapSpec, planner: Planner, donation: Donation) -> None:
        self._spec, self._planner, self._donation = spec, planner, donation
        self._lock = threading.RLock()
        self._services: dict[Form, _Service] = {}
        self._direct: Form | None = None
        self._is_mixed = False
        self.serve: Serve = self._by_form

    def settled(self, workload: Workload, args: Any, kwargs: Any) -> Any:
        """Serves a described call that has no plan, and puts a program into service for it.

        Raises:
            NoViableStrategyError: nothing fits the memory that the budget allows.
            ValueError, TypeError: what `jax.vmap` raises for this call.
        """
        return self._service(args, kwargs).settled(workload, args, kwargs)

    def is_misrouted(self, serve: Serve, args: Any, kwargs: Any) -> bool:
        """Returns whether a call went to jit with objects where others had arrays, or reversed.

        From then on every call is looked at before it goes to jit.

        Args:
            serve: what the call went to.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        if serve == self._by_form or self._form(args, kwargs) == self._direct:
            return False
        with self._lock:
            self._is_mixed, self.serve = True, self._by_form
        return True

    def planned(
        self, args: Any, kwargs: Any, *, anew: bool = False
    ) -> tuple[Workload, Planned, Any]:
        """Returns a call described, its plan, and the jit object that serves it.

        Args:
            args: positional arguments of the call.
            kwargs: its keyword arguments.
            anew: whether to measure again although there is a plan.

        Raises:
            IneligibleStrategyError, NoViableStrategyError, RecordMissError: there is no such plan.
            ValueError, TypeError: what `jax.vmap` raises for this call.
        """
        return self._service(args, kwargs).planned(args, kwargs, anew=anew)

    def relieved(self, args: Any, kwargs: Any) -> bool:
        """Puts the next smaller plan into service for a call that ran out of memory.

        Args:
            args: positional arguments of the call.
            kwargs: its keyword arguments.

        Returns:
            Whether there is one; if not, or if the call has given its arguments away, nothing
            has changed.
        """
        return self._service(args, kwargs).relieved(args, kwargs)

    def _by_form(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._service(args, kwargs).serve(*args, **kwargs)

    def _service(self, args: Any, kwargs: Any) -> _Service:
        form = self._form(args, kwargs)
        with self._lock:
            if form not in self._services:
                self._services[form] = _Service(self, form)
        return self._services[form]

    def _form(self, args: Any, kwargs: Any) -> Form:
        spec = self._spec
        try:
            return form_of(args, kwargs, spec.static_argnums, spec.static_argnames)
        except ValueError:  # on a mapped axis an object is vmap's error, not ours
            jax.vmap(lambda *_, **__: 0, spec.in_axes, axis_size=spec.axis_size)(*args, **kwargs)
            raise

    def entered(self, service: _Service) -> None:
        """Lets calls go straight to a service while all calls have its form."""
        with self._lock:
            self._direct = self._direct or service.form
            self._is_mixed |= service.form != self._direct
            self.serve = self._by_form if self._is_mixed else service.serve


class _Service:
    """Serves the calls of one form."""

    def __init__(self, dispatcher: Dispatcher, form: Form) -> None:
        self._dispatcher, self.form = dispatcher, form
        self._spec, self._planner = dispatcher._spec, dispatcher._planner
        self._donation, self._lock = dispatcher._donation, dispatcher._lock
        self._table: dict[Any, Serve] = {}
        self._probe: Callable[[Any, Any], Any] | None = None
        self._tuned: dict[str, Program] = {}
        self._common: dict[Any, Program] = {}
        self._inlined: dict[str, Strategy] = {}
        self.serve: Serve = self._unserved

    # What follows happens once per signature.

    def _unserved(self, /, *args: Any, **kwargs: Any) -> Any:
        """Serves a call of which nothing is known."""
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            return self._spec.vmapped(self._spec.fun)(*args, **kwargs)
        if self._is_off():
            self.serve = self._off
            self._dispatcher.entered(self)
            return self._off(*args, **kwargs)
        if under_trace(jax.tree.leaves((args, kwargs))):
            return self._traced.jitted(*args, **kwargs)
        with self._lock:  # another thread may have settled this call meanwhile
            program = self._served(args, kwargs)
            if program is None:
                arrays, statics = self._split(args, kwargs)
                program = self._enter_program(describe(self._spec, arrays, statics), args, kwargs)
        return program(*args, **kwargs)

    def settled(self, workload: Workload, args: Any, kwargs: Any) -> Any:
        """Serves a described call that has no plan, and puts a program into service for it."""
        if under_trace(jax.tree.leaves((args, kwargs))):
            self._enter(workload, args, kwargs, None)
            return self._traced.jitted(*args, **kwargs)
        with self._lock:
            program = self._enter_program(workload, args, kwargs)
        return program(*args, **kwargs)

    def planned(
        self, args: Any, kwargs: Any, *, anew: bool = False
    ) -> tuple[Workload, Planned, Any]:
        """Returns a call described, its plan, and the jit object that serves it."""
        arrays, statics = self._split(args, kwargs)
        workload = describe(self._spec, arrays, statics)
        if self._is_off():
            plan = Plan(strategy=VMAP, source="off", outcomes=blank("tuning is off"), key="")
            return workload, Planned(plan=plan), self._off
        leaves = jax.tree.leaves((args, kwargs))
        if under_trace(leaves) or any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            device = device_of(())
            planned = self._planner.inside(workload, arrays, device, self._new_program(device))
            return workload, planned, self._traced.jitted
        with self._lock:
            planned, program = self._program(workload, args, kwargs, anew=anew)
        return workload, planned, program

    def relieved(self, args: Any, kwargs: Any) -> bool:
        """Puts the next smaller plan into service for a call; returns whether there is one."""
        leaves = jax.tree.leaves((args, kwargs))
        gone = any(isinstance(each, jax.Array) and each.is_deleted() for each in leaves)
        if gone or under_trace(leaves) or self._is_off():
            return False
        arrays, statics = self._split(args, kwargs)
        workload, device = describe(self._spec, arrays, statics), device_of(arrays)
        with self._lock:
            key = self._planner.relieve(workload, arrays, device)
            if key is None:
                return False
            self._forget(device, key)
            self._enter_program(workload, args, kwargs)
        return True

    def _forget(self, device: Any, key: str) -> None:
        """Drops the programs that have an old plan compiled in."""
        self._common.pop(device, None)
        self._tuned.pop(key, None)

    def _enter_program(self, workload: Workload, args: Any, kwargs: Any) -> Serve:
        return self._program(workload, args, kwargs)[1]

    def _program(
        self, workload: Workload, args: Any, kwargs: Any, *, anew: bool = False
    ) -> tuple[Planned, Any]:
        """Returns the plan and the jit object in service for a concrete call; tunes if needed."""
        arrays, _ = self._split(args, kwargs)
        device = device_of(arrays)
        new_program = self._new_program(device)
        if anew:
            planned = self._planner.fixed(workload, arrays)
            if planned is None:
                planned = self._planner.tuned_anew(workload, arrays, device, new_program)
            self._forget(device, planned.plan.key)
        else:
            planned = self._planner.known(workload, arrays, device, may_tune=True)
            if planned is None:
                planned = self._planner.tuned(workload, arrays, device, new_program)
        key, strategy = planned.plan.key, planned.plan.strategy
        if key and self._inlined.setdefault(key, strategy) != strategy:
            self._forget(device, key)  # such as an estimate, where there is a record by now
            self._inlined[key] = strategy
        if planned.program is not None and self._donation == Donation():
            self._tuned[key] = planned.program
        program = self._tuned.get(key)
        if program is None:
            program = self._common.get(device)
            if program is None:
                # jit would take one trace for all devices, and the plan with it.
                program = Program(self._spec, self.form, self._resolver(device), self._donation)
                self._common[device] = program
            with program.prepared(workload, planned.plan.strategy):
                program.jitted.trace(*args, **kwargs)  # which the call itself then need not do
        self._enter(workload, args, kwargs, program.jitted)
        return planned, program.jitted

    def _new_program(self, device: Any) -> Callable[[], Program]:
        return lambda: Program(self._spec, self.form, self._resolver(device))

    def _resolver(self, device: Any) -> Resolve:
        def resolve(workload: Workload, arrays: list[Any]) -> Strategy:
            planned = self._planner.known(workload, arrays, device, may_tune=True)
            if planned is None:
                raise Unplanned(workload)
            return planned.plan.strategy

        return resolve

    @functools.cached_property
    def _traced(self) -> Program:
        """Serves calls inside other traces, where nothing of the caller's can be measured.

        It is apart from the others: an estimate made there must not serve a concrete call.
        """

        def resolve(workload: Workload, arrays: list[Any]) -> Strategy:
            device = device_of(())
            new_program = self._new_program(device)
            return self._planner.inside(workload, arrays, device, new_program).plan.strategy

        return Program(self._spec, self.form, resolve, self._donation)

    @functools.cached_property
    def _off(self) -> Any:
        return jit_object(self._spec.vmapped(self._spec.fun), self.form, self._donation)

    def _is_off(self) -> bool:
        return self._planner.strategy is None and self._planner.tuning_mode() == "off"

    def _split(self, args: Any, kwargs: Any) -> tuple[list[Any], Statics]:
        return split(args, kwargs, self.form.static_argnums, self.form.static_argnames)

    # One known shape goes straight to its jit object; several, over a table on the shape of the
    # first mapped argument, which costs less than half a microsecond.

    def _enter(self, workload: Workload, args: Any, kwargs: Any, serve: Serve | None) -> None:
        """Puts a callable into service for calls like this one; None for a call inside a trace."""
        if self._probe is None:
            self._probe = _probe(workload, args, kwargs)
        key = self._key_of(args, kwargs)
        if serve is None:
            serve = self._table.get(key, self._unserved)
        self._table[key] = serve
        if len(self._table) == 1 and not several_kinds() and not several_local_devices():
            self.serve = serve
        else:
            self.serve = self._by_shape()
        self._dispatcher.entered(self)

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

    def _served(self, args: Any, kwargs: Any) -> Serve | None:
        """Returns what another thread has put into service for this call, or None."""
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
