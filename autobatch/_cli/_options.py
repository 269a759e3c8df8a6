"""What several commands share: options and arguments, what they mean, and how faults are told."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from autobatch._errors import AutobatchWarning
from autobatch._record import Record
from autobatch._report import printable
from autobatch._store import Store, open_store

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
store_option = click.option(
    "--store",
    "folder",
    metavar="PATH",
    help="The folder of records; by default $AUTOBATCH_CACHE_DIR, else the user's cache.",
)


def opened(folder: str | None) -> Store:
    """Returns the store in `folder`, or in the default folder for None.

    Raises:
        click.UsageError: the option or the variable names no folder.
    """
    try:
        store = open_store(folder)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    assert store is not None  # only False means none
    return store


def recorded(store: Store) -> list[Record]:
    """Returns the records of a store that can be read, the newest first.

    Raises:
        click.ClickException: there is something wrong with it, and none can be read.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AutobatchWarning)
        records = store.records()
    faults = [each for each in caught if issubclass(each.category, AutobatchWarning)]
    if faults and not records:
        raise click.ClickException(printable(str(faults[0].message)))
    for each in caught:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return records


def found(store: Store, *prefixes: str) -> list[Record]:
    """Returns for each of `prefixes` the one record whose key begins with it.

    Raises:
        click.ClickException: for one there is none, or more than one, or none can be read.
    """
    records = recorded(store)
    return [_only(records, each, store) for each in prefixes]


@contextmanager
def faults_refused() -> Iterator[None]:
    """Makes a fault of the store an error: to change nothing is not what was asked for.

    Raises:
        click.ClickException: the store was passed over.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutobatchWarning)
        try:
            yield
        except AutobatchWarning as fault:
            raise click.ClickException(printable(str(fault))) from None


def echo_json(data: Any) -> None:
    """Prints `data` as JSON."""
    click.echo(json.dumps(data, indent=2))


def counted(count: int) -> str:
    """Returns a number of records in words.

    >>> counted(1), counted(2)
    ('1 record', '2 records')
    """
    return f"{count} record{'' if count == 1 else 's'}"


def _only(records: list[Record], prefix: str, store: Store) -> Record:
    fitting = [each for each in records if prefix and each.key.startswith(prefix)]
    if not fitting:
        raise click.ClickException(f"no record in {store.path} has a key that begins {prefix!r}")
    if len(fitting) > 1:
        keys = ", ".join(printable(each.key[: len(prefix) + 4]) for each in fitting[:5])
        more = ", ..." if len(fitting) > 5 else ""
        raise click.ClickException(f"{len(fitting)} keys begin {prefix!r}: {keys}{more}")
    return fitting[0]
