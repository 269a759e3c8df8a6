"""One jit object: what a call of it traces, and where it gets its strategy from.

jit's own cache is the dispatch table. Its miss runs the body below, once per signature; the body
describes the call, is told the strategy, and maps. Which program serves which call is in
`_dispatch`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from autobatch._derivative import Resolve, mapped_with_derivatives
from autobatch._eligibility import why_only_vmap
from autobatch._leaves import Form, Statics, form_of, split, split_traced
from autobatch._mapping import mapped
from autobatch._pullback import value_and_pullback
from autobatch._strategies import VMAP, Strategy
from autobatch._workload import MapSpec, Workload, describe


class Unplanned(Exception):
    """Raised out of a trace: this workload has no plan yet and must be tuned outside."""

    def __init__(self, workload: Workload) -> None:
        super().__init__("no plan for this call")
        self.workload = workload


class Misrouted(TypeError):
    """Raised out of a trace: a number stands where this jit object compiles an object in."""


@dataclass(frozen=True, kw_only=True)
class Donation:
    """Which arguments a call gives away, as `jax.jit` takes it."""

    argnums: tuple[int, ...] = ()
    argnames: tuple[str, ...] = ()


class Prepared:
    """A jit object that can be told what it traces next.

    Attributes:
        jitted: the jit object. What is compiled on it lives as long as it does.
    """

    jitted: Any

    def __init__(self) -> None:
        self._prepared: tuple[Workload, Strategy] | None = None

    @contextmanager
    def prepared(self, workload: Workload, strategy: Strategy) -> Iterator[None]:
        """Lets traces of this workload use what is known already, without tracing `fun` again.

        Afterwards it is forgotten: a jaxpr holds constants, and is not kept per shape.
        """
        self._prepared = (workload, strategy)
        try:
            yield
        finally:
            self._prepared = None


class Pullback(Prepared):
    """A jit object of the value and the pullback of one workload, which it must be told."""

    def __init__(self) -> None:
        """Makes the jit object; nothing is traced yet."""
        super().__init__()

        def body(*operands: Any) -> list[Any]:
            assert self._prepared is not None
            workload, strategy = self._prepared
            assert workload.row is not None
            return value_and_pullback(strategy, workload.row, operands, workload.moving or ())

        self.jitted = jax.jit(body)


class Program(Prepared):
    """A jit object that serves every signature for which `resolve` knows a strategy."""

    def __init__(
        self,
        spec: MapSpec,
        form: Form,
        resolve: Resolve,
        derive: Resolve,
        donation: Donation | None = None,
    ) -> None:
        """Makes the jit object; nothing is traced yet.

        Args:
            spec: the function and its axes.
            form: how the calls that it serves reach jit.
            resolve: where the strategy comes from; raises `Unplanned` if there is none yet.
            derive: where it comes from where the call is differentiated; see `_derivative`.
            donation: the arguments that calls give away; None for none.
        """
        super().__init__()

        @functools.wraps(spec.fun, updated=())
        def body(*args: Any, **kwargs: Any) -> Any:
            if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                return spec.vmapped(spec.fun)(*args, **kwargs)
            if form_of(args, kwargs, spec.static_argnums, spec.static_argnames) != form:
                raise Misrouted
            arrays, statics = split_traced(args, kwargs)
            prepared = self._prepared  # another thread may take it away
            if prepared is not None and prepared[0].serves(arrays, statics):
                workload, strategy = prepared
            else:
                workload = describe(spec, arrays, statics)
                strategy = resolve(workload, arrays)
            if workload.row is None:
                return spec.vmapped(spec.fun)(*args, **kwargs)
            row, operands = workload.row, [*workload.consts, *arrays]
            if strategy == VMAP and why_only_vmap(workload, arrays) is not None:
                outputs = mapped(VMAP, row, operands)  # and so are its derivatives
            else:
                outputs = mapped_with_derivatives(strategy, row, operands, derive)
            return jax.tree.unflatten(workload.out_tree, outputs)

        self.jitted = jit_object(body, form, donation or Donation())


def jit_object(body: Callable[..., Any], form: Form, donation: Donation) -> Any:
    """Returns a jit object of `body` for calls of a form; it has `trace` and `lower`.

    Args:
        body: the function to compile.
        form: how calls reach jit.
        donation: the arguments that calls give away.
    """
    if form.is_packed:
        return _Packed(body, form)
    return jax.jit(
        body,
        static_argnums=form.static_argnums or None,
        static_argnames=form.static_argnames or None,
        donate_argnums=donation.argnums or None,
        donate_argnames=donation.argnames or None,
    )


class _Packed:
    """A jit object for calls with objects inside trees of arrays, which it takes apart first.

    It costs a flattening per call. Nothing is donated.
    """

    def __init__(self, body: Callable[..., Any], form: Form) -> None:
        self._form = form

        @functools.wraps(body, updated=())
        def packed(statics: Statics, arrays: Sequence[Any]) -> Any:
            args, kwargs = statics.rebuilt(arrays)
            return body(*args, **kwargs)

        del packed.__wrapped__  # its signature is not the function's
        self._jitted = jax.jit(packed, static_argnums=0)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(*self._taken_apart(args, kwargs))

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._jitted.trace(*self._taken_apart(args, kwargs))

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._jitted.lower(*self._taken_apart(args, kwargs))

    def _taken_apart(self, args: Any, kwargs: Any) -> tuple[Statics, list[Any]]:
        form = self._form
        arrays, statics = split(args, kwargs, form.static_argnums, form.static_argnames)
        return statics, arrays
