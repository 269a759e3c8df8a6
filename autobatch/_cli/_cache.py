"""`autobatch cache`: what is remembered, without jax."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from autobatch._choose import Plan, choose, explained, smallest
from autobatch._cli._cache_files import export_records, import_records
from autobatch._cli._cache_removal import clear, prune, remove
from autobatch._cli._options import echo_json, found, json_option, opened, recorded, store_option
from autobatch._digest import differing
from autobatch._record import Record, to_data
from autobatch._report import explain, printable
from autobatch._strategies import VMAP, Strategy

NEWEST = 100
"""How many records the table shows unless all are asked for."""

# How many characters of a part a table shows, and how many of them stand before the difference.
_LONG, _BEFORE = 60, 12


@click.group()
def cache() -> None:
    """Look at the records of earlier tunings, remove them, or carry them elsewhere."""


for _each in (clear, export_records, import_records, prune, remove):
    cache.add_command(_each)


@cache.command("list")
@click.option("--all", "everything", is_flag=True, help=f"Show more than the newest {NEWEST}.")
@json_option
@store_option
def list_records(everything: bool, as_json: bool, folder: str | None) -> None:
    """List the records, the newest first.

    JSON holds all of them, with the strategy that each record's own limits lead to.
    """
    store = opened(folder)
    records = recorded(store)
    if as_json:
        echo_json([_summary(each) for each in records])
    elif not records:
        click.echo(f"no records in {store.path}")
    else:
        shown = records if everything else records[:NEWEST]
        heading = ("key", "name", "strategy", "rows", "device", "created")
        _print_table(heading, [_row(each) for each in shown])
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
    (record,) = found(opened(folder), key)
    if as_json:
        echo_json({**_summary(record), **to_data(record)})
        return
    strategy = _strategy(record) or _fallback(record)
    limits = record.searched
    outcomes = explained(record, limits, strategy)
    plan = Plan(strategy=strategy, source="record", outcomes=outcomes, key=record.key)
    click.echo(explain(record, plan, limits))


@cache.command()
@click.argument("key")
@click.argument("other", metavar="KEY")
@json_option
@store_option
def diff(key: str, other: str, as_json: bool, folder: str | None) -> None:
    """Show the parts that differ between two keys, each given by how it begins.

    The table cuts long parts to where they begin to differ. JSON holds them whole; what only one
    key has is missing from the other.
    """
    records = found(opened(folder), key, other)
    one, two = (each.parts for each in records)
    names = differing(one, two)
    if as_json:
        sides = {"one": one, "other": two}
        parts = [
            {"part": name, **{side: each[name] for side, each in sides.items() if name in each}}
            for name in names
        ]
        echo_json({"keys": [each.key for each in records], "parts": parts})
    elif not names:
        click.echo("no part of the keys differs")
    else:
        rows = [(name, *_excerpts(_text(one, name), _text(two, name))) for name in names]
        _print_table(("part", *(each.key[:8] for each in records)), rows)


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


def _row(record: Record) -> tuple[str, ...]:
    strategy = _strategy(record)
    return (
        record.key[:8],
        record.name,
        "-" if strategy is None else str(strategy),
        str(record.batch_size),
        record.device,
        record.created,
    )


def _text(parts: Mapping[str, Any], name: str) -> str:
    return json.dumps(parts[name], ensure_ascii=False) if name in parts else "-"


def _excerpts(one: str, other: str) -> tuple[str, str]:
    """Returns both texts; if one is long, as much as fits from where they begin to differ."""
    if max(len(one), len(other)) <= _LONG:
        return one, other
    pairs = enumerate(zip(one, other, strict=False))
    same = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(0, same - _BEFORE)
    first, second = (
        f"{'...' if start else ''}{each[start : start + _LONG]}"
        f"{'...' if len(each) > start + _LONG else ''}"
        for each in (one, other)
    )
    return first, second


def _print_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console.width = 1000  # lines of a pipe are not cut
    table = Table(box=None, pad_edge=False)
    for each in heading:
        table.add_column(Text(printable(each)))
    for row in rows:
        table.add_row(*(Text(printable(each)) for each in row))
    console.print(table)
