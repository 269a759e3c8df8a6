"""The decorator and what it returns: calls, `plan`, `explain`, `tune`, `lower`.

Which jit object serves a call is in `_dispatch`, which strategy in `_planner`.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import jax.stages

from autobatch._choose import Budget, Plan
from autobatch._devices import device_of
from autobatch._dispatch import Dispatcher
from autobatch._errors import is_out_of_memory
from autobatch._gradient import ForGradient, check_concrete
from autobatch._planner import Planner
from autobatch._program import Donation, Unplanned
from autobatch._settings import Mode, checked_mode
from autobatch._strategies import Strategy
from autobatch._workload import MapSpec

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
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
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
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
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
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    name: str | None = None,
) -> BatchedFunction[P, R] | Callable[[Callable[P, R]], BatchedFunction[P, R]]:
    """Returns `fun` mapped over a batch, with the meaning of `jax.jit(jax.vmap(fun))`.

    How the batch is mapped is measured on the first call of every shape, on its real arrays, and
    remembered on disk. From then on a call is a `jax.jit` call.

    Args:
        fun: the function of one example. Left out, a decorator with these options is returned.
        in_axes: the mapped axis of each positional argument, or None, as `jax.vmap` takes them;
            keyword arguments of the call are mapped on axis 0.
        out_axes: where the batch axis stands in each output, as `jax.vmap` takes them. A leaf may
            be `autobatch.SUM` or `autobatch.MEAN`: that output is reduced over the batch while the
            rows are worked on, and products that gradients end in (of matrices, convolutions,
            look-ups) are contracted over all rows of a step instead of being made for each. Floats
            of less than 32 bits are added in float32 and cast back, integers in their own type,
            where they may wrap; integers have no mean.
        axis_name: name of the batch axis for collectives.
        axis_size: rows of the batch, for a call without a mapped argument.
        spmd_axis_name: as `jax.vmap` takes it.
        budget: limits on memory, compile and tuning time, and the calls that a compile is spread
            over; default `Budget()`.
        strategy: forces `"vmap"`, `"map"`, `"chunked:K"` (K rows at a time, `lax.map`'s
            `batch_size`) or `"unrolled"`: no tuning, no memory gate. With `"+remat"`, as in
            `"chunked:64+remat"`, derivatives compute each step again (`jax.checkpoint`) and need
            the memory of one step; without, they keep the values of all steps, as `lax.map` does.
        tune: `"first-call"` (default), `"cached"` (the record, else that of the nearest batch size,
            else an estimate by bounds of memory; never measures), `"require"` (no record is an
            error), `"force"` (measures again, once per signature) or `"off"` (plain
            `jax.jit(jax.vmap(fun))`). None reads `AUTOBATCH_TUNE`.
        store: folder of the records; None is the default folder, False keeps none.
        static_argnums: positional arguments that are compiled in, as `jax.jit` takes them; their
            entry in `in_axes` is None. Unmapped objects that are no arrays are static anyway.
        static_argnames: keyword arguments that are compiled in.
        donate_argnums: positional arguments that a call gives away, as `jax.jit` takes them.
            Tuning does not consume them.
        donate_argnames: keyword arguments that a call gives away.
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
        argnums, argnames = _both(function, _tuple(static_argnums), _tuple(static_argnames))
        spec = MapSpec(
            fun=function,
            in_axes=in_axes,
            out_axes=out_axes,
            axis_name=axis_name,
            axis_size=axis_size,
            spmd_axis_name=spmd_axis_name,
            static_argnums=argnums,
            static_argnames=argnames,
        )
        if budget is not None and not isinstance(budget, Budget):
            raise ValueError(f"budget must be an autobatch.Budget; got {budget!r}")
        forced = strategy
        if forced is not None and not isinstance(forced, Strategy):
            forced = Strategy.parse(forced)
        if store is not None and store is not False and not isinstance(store, str | os.PathLike):
            raise ValueError(f"store must be a folder, False for none, or None; got {store!r:.80}")
        planner = Planner(
            name=name or getattr(function, "__name__", type(function).__name__),
            key_name=name,
            budget=budget or Budget(),
            strategy=forced,
            mode=None if tune is None else checked_mode(tune),
            store=store,
        )
        donation = Donation(argnums=_tuple(donate_argnums), argnames=_tuple(donate_argnames))
        return BatchedFunction(spec, planner, donation)

    return decorate if fun is None else decorate(fun)


class BatchedFunction(Generic[P, R]):
    """A function mapped over a batch; what `autobatch` returns. Call it as `jax.vmap(fun)`."""

    def __init__(self, spec: MapSpec, planner: Planner, donation: Donation) -> None:
        spec.vmapped(spec.fun)  # vmap's own errors for wrong axes come from here
        self._options = (spec, planner, donation)
        self._planner = planner
        self.__wrapped__: Callable[..., Any] = spec.fun
        self._dispatcher = Dispatcher(spec, planner, donation)
        functools.update_wrapper(self, spec.fun, updated=())

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns `jax.vmap(fun)(*args, **kwargs)`; tunes if there is no plan for these shapes.

        Raises:
            ValueError, TypeError: what `jax.vmap` raises for this call.
            IneligibleStrategyError: `strategy=` would not keep vmap's meaning.
            NoViableStrategyError: nothing fits the memory that the budget allows.
            RecordMissError: `tune="require"`, and there is no record.
        """
        dispatcher = self._dispatcher
        serve = dispatcher.serve
        try:
            return serve(*args, **kwargs)
        except Unplanned as unplanned:
            workload = unplanned.workload
        except (TypeError, ValueError):
            if not dispatcher.is_misrouted(serve, args, kwargs):
                raise
            return self(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not dispatcher.relieved(args, kwargs):
                raise
            return dispatcher.serve(*args, **kwargs)
        return dispatcher.settled(workload, args, kwargs)

    def plan(self, /, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Returns the plan for these shapes; tunes if there is none. Does not run the function.

        Raises:
            ValueError, TypeError: what `jax.vmap` raises for this call.
            IneligibleStrategyError: `strategy=` would not keep vmap's meaning.
            NoViableStrategyError: nothing fits the memory that the budget allows.
            RecordMissError: `tune="require"`, and there is no record.
        """
        return self._dispatcher.planned(args, kwargs)[1].plan

    def explain(self, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """Returns a table of every candidate for these shapes; tunes if there is no plan.

        Raises:
            ValueError, TypeError: what `jax.vmap` raises for this call.
            IneligibleStrategyError: `strategy=` would not keep vmap's meaning.
            NoViableStrategyError: nothing fits the memory that the budget allows.
            RecordMissError: `tune="require"`, and there is no record.
        """
        workload, planned, _ = self._dispatcher.planned(args, kwargs)
        return planned.table(
            self._planner.title(workload),
            workload.batch_size,
            device_of(jax.tree.leaves((args, kwargs))),
        )

    @property
    def for_gradient(self) -> ForGradient[P]:
        """The plans for calls that are differentiated; `for_gradient(argnums=...)` says by what."""
        return ForGradient(self._dispatcher, self._planner)

    def tune(self, /, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Measures again on these arrays, replaces the record, and returns the new plan.

        Raises:
            ValueError, TypeError: what `jax.vmap` raises for this call, and for traced arguments.
            IneligibleStrategyError: `strategy=` would not keep vmap's meaning.
            NoViableStrategyError: nothing fits the memory that the budget allows.
        """
        check_concrete(args, kwargs, f"`{self._planner.name}.tune(...)`")
        return self._dispatcher.planned(args, kwargs, anew=True)[1].plan

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Returns the chosen program for these shapes, lowered; tunes if there is no plan.

        Raises:
            ValueError, TypeError: what `jax.vmap` raises for this call.
            IneligibleStrategyError: `strategy=` would not keep vmap's meaning.
            NoViableStrategyError: nothing fits the memory that the budget allows.
            RecordMissError: `tune="require"`, and there is no record.
        """
        return self._dispatcher.planned(args, kwargs)[2].lower(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the method bound to `instance`; `in_axes` counts the instance."""
        if instance is None or isinstance(self.__wrapped__, staticmethod):
            return self
        return BoundFunction(self, instance)

    def __copy__(self) -> BatchedFunction[P, R]:
        return BatchedFunction(*self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchedFunction[P, R]:
        return BatchedFunction(*self._options)

    def __repr__(self) -> str:
        return f"<autobatch of {self._planner.name}>"


class BoundFunction:
    """A mapped method of one object, which stands before the arguments of every call."""

    def __init__(self, batched: BatchedFunction[..., Any], instance: Any) -> None:
        self.__func__, self.__self__ = batched, instance
        functools.update_wrapper(self, batched, updated=())
        self.__wrapped__ = types.MethodType(batched.__wrapped__, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the mapped method's result; see `BatchedFunction.__call__`."""
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "for_gradient":
            return self.__func__.for_gradient.of_object(self.__self__)
        if name not in ("plan", "explain", "tune", "lower"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(getattr(self.__func__, name), self.__self__)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BoundFunction)
            and self.__func__ is other.__func__
            and self.__self__ is other.__self__
        )

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __repr__(self) -> str:
        return f"<{self.__func__!r} bound to {self.__self__!r}>"


def _tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, int | str) else tuple(value)


def _both(
    function: Callable[..., Any], numbers: tuple[int, ...], names: tuple[str, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns static arguments by number and by name, since a call may pass them either way.

    Raises:
        ValueError: a number or name is none of the function's arguments.
    """
    if not numbers and not names:
        return (), ()
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return numbers, names
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [each.name for each in parameters.values() if each.kind in by_place]
    kinds = {each.kind for each in parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
        return numbers, names
    for number in numbers:
        if not -len(places) <= number < len(places):
            raise ValueError(
                f"static_argnums has {number}, and `fun` takes {len(places)} arguments"
            )
    for name in names:
        if name not in parameters:
            raise ValueError(f"static_argnames has {name!r}; `fun` takes {list(parameters)}")
    named = {*names, *(places[number] for number in numbers)}
    return tuple(places.index(each) for each in places if each in named), tuple(sorted(named))
