"""Which jit object serves which call.

A call goes to a jit object, whose own cache is the dispatch table. Each tuned plan has its own jit
object, because the winner's executable lives on the one that it was compiled on; everything else
shares one. A signature without a plan makes jit trace, the trace finds none and unwinds to the
call, which still holds the arguments, tunes on them, and puts the winner's object into service.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core

from autobatch._choose import Plan, blank
from autobatch._derivative import Resolve, is_differentiated
from autobatch._devices import device_of, is_abstract, several_local_devices, under_trace
from autobatch._fixed import alone_inside
from autobatch._leaves import Form, Statics, form_of, split
from autobatch._planned import Planned
from autobatch._planner import Planner
from autobatch._program import Donation, Program, Pullback, Unplanned, jit_object
from autobatch._pullback import derivative_of, moving_operands
from autobatch._routes import Routes, Serve
from autobatch._strategies import VMAP, Strategy
from autobatch._workload import MapSpec, Workload, describe

_OFF = Planned(plan=Plan(strategy=VMAP, source="off", outcomes=blank("tuning is off"), key=""))


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

    def planned_derivative(
        self,
        args: Any,
        kwargs: Any,
        argnums: Sequence[int],
        *,
        first: int = 0,
        anew: bool = False,
    ) -> tuple[Workload, Planned]:
        """Returns the value and the pullback of a call described, and their plan.

        Args:
            args: positional arguments of the call.
            kwargs: its keyword arguments.
            argnums: the arguments that are differentiated.
            first: the argument that `argnums` counts from.
            anew: whether to measure again although there is a plan.

        Raises:
            IneligibleStrategyError, NoViableStrategyError, RecordMissError: there is no such plan.
            ValueError, TypeError: what JAX raises for this call, or for its derivative.
        """
        return self._service(args, kwargs).planned_derivative(
            args, kwargs, argnums, first=first, anew=anew
        )

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
        self._routes = Routes(self._unserved)
        self._tuned: dict[str, Program] = {}
        self._common: dict[Any, Program] = {}
        self._inlined: dict[str, Strategy] = {}
        self._derived: dict[str, Strategy] = {}
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
        leaves = jax.tree.leaves((args, kwargs))
        if under_trace(leaves):
            return self._inside(leaves).jitted(*args, **kwargs)
        with self._lock:  # another thread may have settled this call meanwhile
            program = self._routes.found(args, kwargs)
            if program is None:
                arrays, statics = self._split(args, kwargs)
                program = self._enter_program(describe(self._spec, arrays, statics), args, kwargs)
        return program(*args, **kwargs)

    def settled(self, workload: Workload, args: Any, kwargs: Any) -> Any:
        """Serves a described call that has no plan, and puts a program into service for it."""
        leaves = jax.tree.leaves((args, kwargs))
        if under_trace(leaves):
            self._enter(workload, args, kwargs, None)
            return self._inside(leaves).jitted(*args, **kwargs)
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
            return workload, _OFF, self._off
        if is_abstract(jax.tree.leaves((args, kwargs))):
            planned = self._planned_inside(workload, arrays)
            return workload, planned, self._traced.jitted
        with self._lock:
            planned, program = self._program(workload, args, kwargs, anew=anew)
        return workload, planned, program

    def planned_derivative(
        self,
        args: Any,
        kwargs: Any,
        argnums: Sequence[int],
        *,
        first: int = 0,
        anew: bool = False,
    ) -> tuple[Workload, Planned]:
        """Returns the value and the pullback of a call described, and their plan."""
        arrays, statics = self._split(args, kwargs)
        workload = describe(self._spec, arrays, statics)
        moving = moving_operands(workload, args, argnums, first=first)
        if self._is_off():
            return workload, _OFF
        if workload.row is None:
            planned = self._planner.fixed(workload, arrays)
            assert planned is not None
            return workload, planned
        workload, arrays = derivative_of(workload, arrays, moving)
        if self._planner.strategy is None and several_local_devices():
            return workload, Planned(plan=alone_inside())  # and that is where derivatives are taken
        if is_abstract(jax.tree.leaves((args, kwargs))):
            return workload, _derivative_inside(self._planner, workload, arrays)
        with self._lock:
            planned = self._planner.planned(
                workload, arrays, device_of(arrays), Pullback, anew=anew
            )
            key, strategy = planned.plan.key, planned.plan.strategy
            if self._derived.get(key, strategy) != strategy:
                self._forget_all()
        return workload, planned

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
        planned = self._planner.planned(
            workload, arrays, device, self._new_program(device), anew=anew
        )
        if anew:
            self._forget(device, planned.plan.key)
        key, strategy = planned.plan.key, planned.plan.strategy
        if key and self._inlined.setdefault(key, strategy) != strategy:
            self._forget(device, key)  # such as an estimate, where there is a record by now
            self._inlined[key] = strategy
        if isinstance(planned.program, Program) and self._donation == Donation():
            self._tuned[key] = planned.program
        if anew or planned.program is not None:
            self._forget_inside()
        program = self._tuned.get(key)
        if program is None:
            program = self._common.get(device)
            if program is None:
                # jit would take one trace for all devices, and the plan with it.
                resolve = self._resolver(device)
                program = Program(self._spec, self.form, resolve, self._derive, self._donation)
                self._common[device] = program
            with program.prepared(workload, planned.plan.strategy):
                program.jitted.trace(*args, **kwargs)  # which the call itself then need not do
        self._enter(workload, args, kwargs, program.jitted)
        return planned, program.jitted

    def _new_program(self, device: Any) -> Callable[[], Program]:
        return lambda: Program(self._spec, self.form, self._resolver(device), self._derive)

    def _resolver(self, device: Any) -> Resolve:
        def resolve(workload: Workload, arrays: list[Any]) -> Strategy:
            planned = self._planner.known(workload, arrays, device, may_tune=True)
            if planned is None:
                raise Unplanned(workload)
            return planned.plan.strategy

        return resolve

    def _inside(self, leaves: Sequence[Any]) -> Program:
        """Returns what serves a call inside another trace."""
        return self._replaced if is_differentiated(leaves) else self._traced

    def _forget_all(self) -> None:
        """Drops every program: their derivatives have an old plan compiled in."""
        self._tuned.clear()
        self._common.clear()
        self._derived.clear()
        self._forget_inside()
        self._routes, self.serve = Routes(self._unserved), self._unserved
        self._dispatcher.entered(self)

    def _forget_inside(self) -> None:
        """Drops what serves calls inside traces: they are planned again, by what is known now."""
        for name in ("_traced", "_replaced"):
            self.__dict__.pop(name, None)

    @functools.cached_property
    def _traced(self) -> Program:
        """Serves calls inside other traces, where nothing of the caller's can be measured.

        It is apart from the others: an estimate made there must not serve a concrete call.
        """

        def resolve(workload: Workload, arrays: list[Any]) -> Strategy:
            if is_differentiated(workload.consts):
                return self._resolve_replaced(workload, arrays)
            return self._planned_inside(workload, arrays).plan.strategy

        return Program(self._spec, self.form, resolve, self._derive, self._donation)

    @functools.cached_property
    def _replaced(self) -> Program:
        """Serves calls that are being differentiated: their derivatives run in their place.

        It is apart from `_traced`: a plan that nothing was measured for must not serve there.
        """
        return Program(self._spec, self.form, self._resolve_replaced, self._derive, self._donation)

    def _planned_inside(self, workload: Workload, arrays: list[Any]) -> Planned:
        from autobatch._inside import planned_inside

        device = device_of(())
        return planned_inside(self._planner, workload, arrays, device, self._new_program(device))

    def _resolve_replaced(self, workload: Workload, arrays: list[Any]) -> Strategy:
        from autobatch._inside import replaced_inside

        return replaced_inside(self._planner, workload, arrays, device_of(())).plan.strategy

    @property
    def _derive(self) -> Resolve:
        # Nothing here leads to the function: see `_derivative`.
        planner, derived = self._planner, self._derived

        def derive(workload: Workload, arrays: list[Any]) -> Strategy:
            plan = _derivative_inside(planner, workload, arrays).plan
            derived[plan.key] = plan.strategy
            return plan.strategy

        return derive

    @functools.cached_property
    def _off(self) -> Any:
        return jit_object(self._spec.vmapped(self._spec.fun), self.form, self._donation)

    def _is_off(self) -> bool:
        return self._planner.strategy is None and self._planner.tuning_mode() == "off"

    def _split(self, args: Any, kwargs: Any) -> tuple[list[Any], Statics]:
        return split(args, kwargs, self.form.static_argnums, self.form.static_argnames)

    def _enter(self, workload: Workload, args: Any, kwargs: Any, serve: Serve | None) -> None:
        """Puts a callable into service for calls like this one; None for a call inside a trace."""
        self.serve = self._routes.entered(workload, args, kwargs, serve)
        self._dispatcher.entered(self)


def _derivative_inside(planner: Planner, workload: Workload, arrays: list[Any]) -> Planned:
    from autobatch._inside import planned_inside

    return planned_inside(planner, workload, arrays, device_of(()), Pullback)
