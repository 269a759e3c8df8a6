"""The process in which `autobatch tune` compiles and runs: it may crash, hang or be killed.

It takes requests and gives reports as JSON, one a line, over two pipes; `_supervisor` is at their
other ends. Each request is answered by any number of `began`, `trying`, `learnt` and `warning`, and
at last by `planned` or `refused`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autobatch as package
from autobatch._api import BatchedFunction, BoundFunction, autobatch
from autobatch._cli._request import Request
from autobatch._devices import device_of
from autobatch._errors import AutobatchError, AutobatchWarning
from autobatch._job import NewProgram, Phase, Supervision
from autobatch._leaves import form_of, split
from autobatch._planned import Planned
from autobatch._planner import Planner
from autobatch._program import Program, Pullback, Unplanned
from autobatch._pullback import derivative_of, moving_operands
from autobatch._record import Outcome, Record, to_data
from autobatch._store import open_store
from autobatch._strategies import VMAP, Strategy
from autobatch._synthetic import stand_ins
from autobatch._workload import MapSpec, Workload, describe

GRACE_S = 5.0
"""A compile may overrun its limit by so much before it is ended."""
_LONGEST_MESSAGE = 300

Tell = Callable[..., None]
"""Sends a report: its event, then what it holds."""


class _Refused(Exception):
    """The request cannot be served; the message says why."""


def main() -> None:
    """Serves the requests of one pipe until it is closed, then ends the process."""
    asked, told = (int(each) for each in sys.argv[1:])
    os.set_inheritable(asked, False)
    os.set_inheritable(told, False)
    lock = threading.Lock()

    def tell(event: str, **what: Any) -> None:
        line = memoryview(f"{json.dumps({'event': event, **what})}\n".encode())
        with lock:
            try:
                while line:
                    line = line[os.write(told, line) :]
            except OSError:  # nobody listens any more
                os._exit(1)

    def warn(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, AutobatchWarning):
            tell("warning", text=str(message))
        else:
            show_others(message, category, *where)

    show_others: Any = warnings.showwarning
    warnings.showwarning = warn
    warnings.simplefilter("always", AutobatchWarning)
    logging.getLogger("autobatch").addHandler(logging.NullHandler())  # the reports say the same
    sys.path.insert(0, str(Path.cwd()))
    for request in _requests(asked):
        try:
            _serve(request, tell)
        except (_Refused, AutobatchError) as error:
            tell("refused", message=str(error))
        except (Exception, SystemExit) as error:
            tell("refused", message=f"`{request.target}`: {_told(error)}")


def _requests(pipe: int) -> Iterator[Request]:
    """Yields what is asked. When nobody can ask any more the process ends, whatever it does."""
    queue: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        with os.fdopen(pipe, encoding="utf-8") as lines:
            for line in lines:
                queue.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield Request.from_json(queue.get())


def _serve(request: Request, tell: Tell) -> None:
    """Tunes one function on one set of arguments, or finds its record."""
    batched, before = _loaded(request)
    spec, own, _ = batched._options
    planner = _planner(own, request, tell)
    store = open_store(planner.store)
    tell("began", store=None if store is None else str(store.path))
    workload, arrays, new_program = _described(request, spec, before)
    device = device_of(arrays)
    planned = _planned(request, planner, workload, arrays, device, new_program)
    plan = planned.plan
    tell(
        "planned",
        plan={
            "key": plan.key,
            "name": planner.title(workload),
            "strategy": str(plan.strategy),
            "source": plan.source,
            "batch_size": workload.batch_size,
            "outcomes": [_data(each) for each in plan.outcomes],
        },
        record=None if planned.record is None else to_data(planned.record),
        table=planned.table(planner.title(workload), workload.batch_size, device),
    )


def _described(
    request: Request, spec: MapSpec, before: tuple[Any, ...]
) -> tuple[Workload, list[Any], NewProgram]:
    """Returns what is to be tuned, its arrays, and what makes programs of it.

    Raises:
        _Refused: there are no such arrays.
        ValueError, TypeError: what `jax.vmap` raises for this call, or `for_gradient`.
    """
    args = (*before, *_arguments(request))
    arrays, statics = split(args, {}, spec.static_argnums, spec.static_argnames)
    workload = describe(spec, arrays, statics)
    if request.argnums is None:
        return workload, arrays, _programs(spec, args)
    moving = moving_operands(workload, args, request.argnums, first=len(before))
    if workload.row is not None:
        workload, arrays = derivative_of(workload, arrays, moving)
    return workload, arrays, Pullback


def _planned(
    request: Request,
    planner: Planner,
    workload: Workload,
    arrays: Sequence[Any],
    device: Any,
    new_program: NewProgram,
) -> Planned:
    """Returns the plan: that of a record if it will do, else that of a tuning."""
    fixed = planner.fixed(workload, arrays)
    if fixed is not None:
        return fixed
    if not request.force and request.known is None:
        planned = planner.known(workload, arrays, device, may_tune=True)
        if planned is None or planned.record is None:
            return planner.tuned(workload, arrays, device, new_program)
        ineligible = [
            each.strategy for each in planned.record.outcomes if each.status == "ineligible"
        ]
        if VMAP not in ineligible:
            return planned
        # It may not end, and was left out there; here it is tried.
    return planner.tuned_anew(workload, arrays, device, new_program)


def _planner(own: Planner, request: Request, tell: Tell) -> Planner:
    """Returns the planner that the function has, but watched, and told to measure."""
    options = {
        each.name: getattr(own, each.name)
        for each in fields(own)
        if each.init and not each.name.startswith("_")
    }
    budget = replace(own.budget, **request.budget)
    limits_s = {
        "compile": budget.compile_s + GRACE_S,
        "wait": None,
        "run": request.run_s,
        "time": budget.tuning_s + request.run_s,
    }

    def trying(strategies: Sequence[Strategy], phase: Phase) -> None:
        names = [str(each) for each in strategies]
        tell("trying", strategies=names, phase=phase, limit_s=limits_s[phase])

    def learnt(record: Record) -> None:
        tell("learnt", record=to_data(record))

    changed = {
        "budget": budget,
        "mode": "first-call",
        "store": request.store if request.store is not None else own.store,
        "supervision": Supervision(trying=trying, learnt=learnt, known=request.known),
    }
    return Planner(**{**options, **changed})


def _programs(spec: MapSpec, args: tuple[Any, ...]) -> NewProgram:
    form = form_of(args, {}, spec.static_argnums, spec.static_argnames)

    def resolve(workload: Workload, arrays: list[Any]) -> Strategy:
        raise Unplanned(workload)  # candidates are told their strategy

    return lambda: Program(spec, form, resolve, derive=resolve)


def _loaded(request: Request) -> tuple[BatchedFunction[..., Any], tuple[Any, ...]]:
    """Returns the mapped function, and the object that stands before its arguments, if any."""
    module, _, name = request.target.partition(":")
    found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    axes = {"in_axes": request.in_axes, "out_axes": request.out_axes}
    given = {key: ast.literal_eval(text) for key, text in axes.items() if text is not None}
    if not isinstance(found, BatchedFunction | BoundFunction):
        if not callable(found):
            raise _Refused(f"`{request.target}` is no function: {found!r:.80}")
        return autobatch(found, **given), ()
    if given:
        raise _Refused(f"`{request.target}` has axes of its own; leave out --in-axes, --out-axes")
    if isinstance(found, BoundFunction):
        return found.__func__, (found.__self__,)
    return found, ()


def _arguments(request: Request) -> list[Any]:
    """Returns the arrays that are asked for, made up or read.

    Raises:
        _Refused: there are no such arrays.
    """
    if request.arguments is not None:
        return stand_ins([_shaped(*each) for each in request.arguments])
    path = Path(str(request.inputs))
    try:
        with np.load(path, allow_pickle=False) as file:
            names = list(file.files)
            if all(each.startswith("arg") and each[3:].isdecimal() for each in names):
                names.sort(key=lambda each: int(each[3:]))
            return [jnp.asarray(file[each]) for each in names]
    except Exception as error:  # whatever a file of any kind makes numpy raise
        message = f"{path} holds no arrays that can be used: {_in_one_line(error)}"
        raise _Refused(message) from None


def _shaped(dtype: str, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    if dtype == "key":
        return jax.ShapeDtypeStruct(tuple(shape), jax.random.key(0).dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise _Refused(f"{dtype} is switched off in JAX; set JAX_ENABLE_X64=1")
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _data(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "strategy": str(outcome.strategy)}


def _told(error: BaseException) -> str:
    """Returns an error in one line, with the last place in the user's own code, if there is one."""
    libraries = [str(Path(str(each.__file__)).parent) for each in (package, jax, importlib)]
    places = [
        f" ({Path(each.filename).name}, line {each.lineno})"
        for each in traceback.extract_tb(error.__traceback__)
        if not each.filename.startswith(("<frozen", *libraries))
    ]
    return _in_one_line(error) + (places[-1] if places else "")


def _in_one_line(error: BaseException) -> str:
    message = " ".join(str(error).split())
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


if __name__ == "__main__":
    main()
