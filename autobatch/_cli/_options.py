"""The options that several commands share, and what they mean."""

from __future__ import annotations

import json
from typing import Any

import click

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


def echo_json(data: Any) -> None:
    """Prints `data` as JSON."""
    click.echo(json.dumps(data, indent=2))
