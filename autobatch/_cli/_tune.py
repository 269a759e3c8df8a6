"""`autobatch tune`: a function tuned before any program calls it.

The candidates run in a child process (`_worker`), which is watched (`_supervisor`): one that
crashes, hangs or takes all memory becomes an outcome like any other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import click

from autobatch._choose import Budget, is_measured
from autobatch._cli._arguments import (
    ArgnumsType,
    Argument,
    ArgumentType,
    LiteralType,
    SizesType,
)
from autobatch._cli._options import echo_json, json_option, opened, store_option
from autobatch._cli._request import Request
from autobatch._cli._supervisor import Refused, Report, Supervisor
from autobatch._record import Outcome, from_data
from autobatch._report import printable
from autobatch._strategies import Strategy
from autobatch._units import format_seconds

RUN_S = 60.0
"""A run that takes longer is ended."""

_DOING = {"compile": "compiling", "wait": "waiting to run", "run": "running", "time": "comparing"}


@click.command()
@click.argument("target", metavar="MODULE:FUN")
@click.option(
    "--arg",
    "arguments",
    type=ArgumentType(),
    multiple=True,
    metavar="DTYPE[SHAPE]",
    help="An argument, batch axis included, such as f32[200,1000], bf16[N,3], i32[] or key[64]; "
    "one option for each, in order. Its values are made up.",
)
@click.option(
    "--sizes", type=SizesType(), metavar="N,...", help="Tune once for each size N in --arg."
)
@click.option(
    "--inputs",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Take the arguments from an .npz file: arg0, arg1, ..., or its arrays as stored.",
)
@click.option(
    "--in-axes",
    type=LiteralType(),
    metavar="AXES",
    help="Of a plain function: the mapped axes, such as '(None, 0)'; by default 0.",
)
@click.option("--out-axes", type=LiteralType(), metavar="AXES", help="The same for its results.")
@click.option("--memory", metavar="AMOUNT", help="Budget: 2GiB, 80%, or bytes.")
@click.option("--compile-s", type=float, metavar="S", help="Budget: seconds of one compile.")
@click.option("--tuning-s", type=float, metavar="S", help="Budget: seconds of one tuning.")
@click.option("--expected-calls", type=float, metavar="N", help="Budget: calls to be expected.")
@click.option(
    "--run-s",
    type=click.FloatRange(min=0, min_open=True),
    default=RUN_S,
    show_default=True,
    metavar="S",
    help="End a run that takes longer.",
)
@click.option("--force", is_flag=True, help="Measure again even if there is a record.")
@click.option("--for-gradient", is_flag=True, help="Tune the derivative of FUN instead.")
@click.option(
    "--argnums",
    type=ArgnumsType(),
    metavar="N,...",
    help="With --for-gradient: the arguments that are differentiated, by default 0; '()' for the "
    "arrays that FUN closes over.",
)
@json_option
@store_option
@click.pass_context
def tune(
    context: click.Context,
    target: str,
    arguments: Sequence[Argument],
    sizes: Sequence[int] | None,
    inputs: str | None,
    in_axes: str | None,
    out_axes: str | None,
    run_s: float,
    force: bool,
    for_gradient: bool,
    argnums: Sequence[int] | None,
    as_json: bool,
    folder: str | None,
    **budget: Any,
) -> None:
    """Tune FUN of MODULE ahead of the program that calls it, and keep the record.

    FUN is what `autobatch` returned, with its own axes, name, budget and store, or a plain
    function. The current directory is importable. The record serves calls with the same shapes,
    dtypes, axes and flags in any process; one that is there already is shown and not made again.

    Candidates run in a process of their own. One that crashes, takes all memory, or exceeds
    --compile-s or --run-s is an outcome with its reason, and the others go on; its time does not
    count towards --tuning-s. So strategies that may never end are tried too.

    With --arg the values are random floats, zeros for integers, mixed booleans. The record counts
    as measured on real arrays all the same; where run time depends on values, give --inputs.
    Ctrl-C keeps what was measured, and the same command goes on from there.

    --for-gradient tunes the derivative, as `FUN.for_gradient.tune` does. Its record serves calls
    that are differentiated; others have a record of their own.
    """
    if argnums is not None and not for_gradient:
        raise click.UsageError("--argnums needs --for-gradient.")
    if for_gradient and argnums is None:
        argnums = (0,)
    if not all(target.partition(":")):
        raise click.UsageError(f"{target!r} is no MODULE:FUN, such as package.module:function.")
    request = Request(
        target=target,
        in_axes=in_axes,
        out_axes=out_axes,
        argnums=argnums,
        arguments=None,
        inputs=None if inputs is None else os.path.realpath(inputs),
        budget=_checked(budget),
        store=None if folder is None else str(opened(folder).path),
        force=force,
        run_s=run_s,
    )
    requests = _requests(request, arguments, sizes)
    found: list[Report] = []
    progress = _Progress(is_quiet=as_json)
    with Supervisor(progress) as supervisor:
        try:
            for title, each in requests.items():
                with progress.shown(title):
                    report = supervisor.tuned(each)
                found.append(report)
                if not as_json:
                    click.echo(report["table"] if len(found) == 1 else f"\n{report['table']}")
                _comment(report, store=supervisor.store, is_made_up=inputs is None)
        except Refused as refused:
            raise click.ClickException(printable(str(refused))) from None
        except KeyboardInterrupt:
            click.echo(printable(_kept(supervisor)), err=True)
            context.exit(130)
        finally:
            if as_json and found:
                echo_json([{**(each["record"] or {}), **each["plan"]} for each in found])


def _checked(budget: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the budget that are given.

    Raises:
        click.UsageError: one is out of its range.
    """
    given = {name: value for name, value in budget.items() if value is not None}
    if given.get("memory", "").isdecimal():
        given["memory"] = int(given["memory"])
    try:
        Budget(**given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return given


def _requests(
    request: Request, arguments: Sequence[Argument], sizes: Sequence[int] | None
) -> dict[str, Request]:
    """Returns a request for each size, by what it is called.

    Raises:
        click.UsageError: the arguments are not all given, or given twice.
    """
    if bool(arguments) == (request.inputs is not None):
        raise click.UsageError("Give the arguments either with --arg or with --inputs.")
    if any(None in each.shape for each in arguments) != (sizes is not None):
        raise click.UsageError("N in --arg needs --sizes, and --sizes an N in --arg.")
    if not arguments:
        return {request.title: request}

    def sized(size: int | None) -> Request:
        return replace(request, arguments=[each.sized(size) for each in arguments])

    if sizes is None:
        return {request.title: sized(None)}
    return {f"{request.title}, N = {each}": sized(each) for each in sizes}


def _comment(report: Report, *, store: str | None, is_made_up: bool) -> None:
    """Says what the table does not.

    Raises:
        click.ClickException: nothing could be measured.
    """
    if report["record"] is None:
        return
    record = from_data(report["record"])
    if not is_measured(record):
        raise click.ClickException("no candidate could be measured, so nothing is kept")
    if is_made_up and record.facts.depends_on_values:
        message = "its run time depends on values, and these were made up; --inputs takes real ones"
        click.echo(printable(f"autobatch: `{record.name}`: {message}"), err=True)
    if store is None:
        message = "store=False keeps no record; give --store"
        click.echo(printable(f"autobatch: `{record.name}`: {message}"), err=True)


def _kept(supervisor: Supervisor) -> str:
    """Keeps what an interrupted tuning has measured, and returns what to say."""
    record = supervisor.interrupted()
    if record is None or not is_measured(record):
        return "interrupted: nothing was measured"
    if supervisor.store is None:
        return "interrupted: store=False keeps nothing"
    opened(supervisor.store).put(record)
    return f"interrupted: what was measured is kept in {supervisor.store}"


class _Progress:
    """Shows on standard error how far a tuning is: what it is at on a terminal, else lines alone.

    Nothing moves by itself, since that would take time of the cores that are measured.
    """

    def __init__(self, *, is_quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, quiet=is_quiet)
        self._live: Any = None
        self._title: str | None = None

    @contextmanager
    def shown(self, title: str) -> Iterator[None]:
        """Shows the progress of one tuning."""
        from rich.live import Live

        self._title = title
        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            self._doing(f"loading {title}")
            yield

    def trying(self, strategies: Sequence[Strategy], phase: str) -> None:
        if self._title is not None:
            self._say(f"tuning {self._title}")
            self._title = None
        self._doing(f"   {_DOING[phase]} {', '.join(map(str, strategies))}")

    def learnt(self, outcome: Outcome) -> None:
        told = outcome.reason or outcome.status
        if outcome.run_s is not None:
            run_s, compile_s = format_seconds(outcome.run_s), format_seconds(outcome.compile_s)
            told = f"{run_s} a call, compiled in {compile_s}"
        self._say(f"   {outcome.strategy}: {told}")

    def warned(self, text: str) -> None:
        click.echo(printable(text), err=True)

    def _say(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text(printable(line)), soft_wrap=True)

    def _doing(self, what: str) -> None:
        from rich.text import Text

        self._live.update(Text(printable(what), no_wrap=True), refresh=True)
