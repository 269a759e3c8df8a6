"""`fun.for_gradient`: `plan`, `explain` and `tune` for calls that are differentiated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, ParamSpec

import jax

from autobatch._choose import Plan
from autobatch._devices import device_of, is_abstract
from autobatch._dispatch import Dispatcher
from autobatch._planned import Planned
from autobatch._planner import Planner
from autobatch._workload import Workload

P = ParamSpec("P")


class ForGradient(Generic[P]):
    """The plans of a mapped function for calls whose value and gradient are computed.

    How a batch is best mapped is another question there: the values inside every row are kept for
    the way back, unless they are computed again (`+remat`). A plan that is made ahead, on real
    arrays, serves every derivative of calls with the same shapes, in any process.

    >>> import jax, jax.numpy as jnp
    >>> from autobatch import autobatch
    >>> square = autobatch(lambda w, x: (w * x) ** 2, (None, 0), strategy="chunked:2+remat")
    >>> str(square.for_gradient.plan(2.0, jnp.arange(3.0)).strategy)
    'chunked:2+remat'
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        planner: Planner,
        argnums: Sequence[int] = (0,),
        before: tuple[Any, ...] = (),
    ) -> None:
        self._dispatcher, self._planner = dispatcher, planner
        self._argnums, self._before = tuple(argnums), before

    def __call__(self, argnums: int | Sequence[int] = 0) -> ForGradient[P]:
        """Returns the same for other arguments.

        Args:
            argnums: the arguments that are differentiated, as `jax.grad` takes them. Without
                any, `()`, those are the arrays that the function closes over.
        """
        numbers = (argnums,) if isinstance(argnums, int) else argnums
        return ForGradient(self._dispatcher, self._planner, numbers, self._before)

    def of_object(self, instance: Any) -> ForGradient[...]:
        """Returns the same for a bound method, of whose arguments `argnums` counts the rest."""
        return ForGradient(self._dispatcher, self._planner, self._argnums, (instance,))

    def plan(self, /, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Returns the plan for differentiating such a call; tunes if there is none.

        Raises:
            ValueError, TypeError: what `jax.vmap` and `jax.grad` raise for this call.
            IneligibleStrategyError: `strategy=` would not keep vmap's meaning.
            NoViableStrategyError: nothing fits the memory that the budget allows.
            RecordMissError: `tune="require"`, and there is no record.
        """
        return self._planned(args, kwargs)[1].plan

    def explain(self, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """Returns a table of every candidate for such a call; tunes if there is no plan.

        Raises:
            ValueError, TypeError: what `jax.vmap` and `jax.grad` raise for this call.
            IneligibleStrategyError: `strategy=` would not keep vmap's meaning.
            NoViableStrategyError: nothing fits the memory that the budget allows.
            RecordMissError: `tune="require"`, and there is no record.
        """
        workload, planned = self._planned(args, kwargs)
        return planned.table(
            self._planner.title(workload),
            workload.batch_size,
            device_of(jax.tree.leaves((args, kwargs))),
        )

    def tune(self, /, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Measures again on these arrays, replaces the record, and returns the new plan.

        Raises:
            ValueError, TypeError: what `jax.vmap` and `jax.grad` raise for this call, and for
                traced arguments.
            IneligibleStrategyError: `strategy=` would not keep vmap's meaning.
            NoViableStrategyError: nothing fits the memory that the budget allows.
        """
        check_concrete(args, kwargs, f"`{self._planner.name}.for_gradient.tune(...)`")
        return self._planned(args, kwargs, anew=True)[1].plan

    def _planned(self, args: Any, kwargs: Any, *, anew: bool = False) -> tuple[Workload, Planned]:
        return self._dispatcher.planned_derivative(
            (*self._before, *args), kwargs, self._argnums, first=len(self._before), anew=anew
        )


def check_concrete(args: Any, kwargs: Any, what: str) -> None:
    """Raises where a call does not have the arrays that are to be measured on.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        what: the call in words.

    Raises:
        TypeError: it has shapes, or traced values.
    """
    if is_abstract(jax.tree.leaves((args, kwargs))):
        raise TypeError(
            f"{what} measures on concrete arrays, and was called inside a JAX transformation or "
            "with shapes; call it before, on real arrays"
        )
