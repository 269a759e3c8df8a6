"""`autobatch cache`: what is remembered, without jax."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import click

from autobatch._choose import Plan, choose, explained, smallest
from autobatch._cli._options import echo_json, json_option, opened, store_option
from autobatch._errors import AutobatchWarning
from autobatch._record import Record, to_data
from autobatch._report import explain, printable
from autobatch._store import Store
from autobatch._strategies import VMAP, Strategy

NEWEST = 100
"""How many records the table shows unless all are asked for."""


@click.group()
def cache() -> None:
    """Look at the records of earlier tunings, or clear them."""


@cache.command("list")
@click.option("--all", "everything", is_flag=True, help=f"Show more than the newest {NEWEST}.")
@json_option
@store_option
def list_records(everything: bool, as_json: bool, folder: str | None) -> None:
    """List the records, the newest first.

    JSON holds all of them, with the strategy that each record's own limits lead to.
    """
    store = opened(folder)
    records = store.records()
    if as_json:
        echo_json([_summary(each) for each in records])
    elif not records:
        click.echo(f"no records in {store.path}")
    else:
        shown = records if everything else records[:NEWEST]
        _print_table(shown)
        older = len(records) - len(shown)
        if older:
            one = older == 1
            click.echo(
                f"{older} older {'one: --all shows it' if one else 'ones: --all shows them'}"
            )


@cache.command()
@click.argument("key")
@json_option
@store_option
def show(key: str, as_json: bool, folder: str | None) -> None:
    """Explain the record whose key begins with KEY."""
    record = _found(opened(folder), key)
    if as_json:
        echo_json({**_summary(record), **to_data(record)})
        return
    strategy = _strategy(record) or _fallback(record)
    limits = record.searched
    outcomes = explained(record, limits, strategy)
    plan = Plan(strategy=strategy, source="record", outcomes=outcomes, key=record.key)
    click.echo(explain(record, plan, limits))


@cache.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@store_option
def clear(yes: bool, as_json: bool, folder: str | None) -> None:
    """Remove every record."""
    store = opened(folder)
    if not yes:
        if not can_ask():
            raise click.ClickException("`autobatch cache clear` needs --yes: nobody can be asked")
        click.confirm(f"Remove every record in {store.path}?", abort=True, err=True)
    with warnings.catch_warnings():
        # To remove nothing because of a fault is not to have cleared the store.
        warnings.simplefilter("error", AutobatchWarning)
        try:
            removed = store.clear()
        except AutobatchWarning as fault:
            raise click.ClickException(str(fault)) from None
    if as_json:
        echo_json({"removed": removed})
    else:
        click.echo(f"removed {removed} record{'' if removed == 1 else 's'} from {store.path}")


@cache.command()
@json_option
@store_option
def path(as_json: bool, folder: str | None) -> None:
    """Print the folder of the records."""
    found = str(opened(folder).path)
    if as_json:
        echo_json({"path": found})
    else:
        click.echo(found)


def can_ask() -> bool:
    """Returns whether a person is there to answer."""
    return sys.stdin.isatty()


def _found(store: Store, prefix: str) -> Record:
    """Returns the one record whose key begins with `prefix`.

    Raises:
        click.ClickException: there is none, or more than one.
    """
    fitting = [each for each in store.records() if prefix and each.key.startswith(prefix)]
    if not fitting:
        raise click.ClickException(f"no record in {store.path} has a key that begins {prefix!r}")
    if len(fitting) > 1:
        keys = ", ".join(printable(each.key[: len(prefix) + 4]) for each in fitting[:5])
        more = ", ..." if len(fitting) > 5 else ""
        raise click.ClickException(f"{len(fitting)} keys begin {prefix!r}: {keys}{more}")
    return fitting[0]


def _strategy(record: Record) -> Strategy | None:
    return choose(record, record.searched)


def _fallback(record: Record) -> Strategy:
    """Returns what stands first where nothing fits: the smallest, as without explicit limits."""
    least = smallest(record)
    return VMAP if least is None else least.strategy


def _summary(record: Record) -> dict[str, Any]:
    strategy = _strategy(record)
    return {
        "key": record.key,
        "name": record.name,
        "strategy": None if strategy is None else str(strategy),
        "batch_size": record.batch_size,
        "device": record.device,
        "created": record.created,
        "versions": {name: record.parts.get(name) for name in ("jax", "jaxlib")},
    }


def _print_table(records: list[Record]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = 1000  # lines of a pipe are not cut
    table = Table("key", "name", "strategy", "rows", "device", "created", box=None, pad_edge=False)
    for record in records:
        summary = _summary(record)
        cells = (
            record.key[:8],
            record.name,
            summary["strategy"] or "-",
            str(record.batch_size),
            record.device,
            record.created,
        )
        table.add_row(*(Text(printable(each)) for each in cells))
    console.print(table)
