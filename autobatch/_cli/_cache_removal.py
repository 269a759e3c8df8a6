"""`autobatch cache remove|prune|clear`: what is forgotten."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version

import click

from autobatch._cli._options import (
    counted,
    echo_json,
    faults_refused,
    found,
    json_option,
    opened,
    store_option,
)
from autobatch._record import Record, created_at
from autobatch._store import Store

_HOURS = {"h": 1, "d": 24, "w": 7 * 24}


class _Age(click.ParamType):
    name = "age"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        match = re.fullmatch(r"([0-9]{1,6})([hdw])", value)
        if match is None:
            self.fail(f"{value!r} is no age such as 12h, 30d or 8w.", param, ctx)
        return timedelta(hours=int(match[1]) * _HOURS[match[2]])


@click.command()
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@json_option
@store_option
def remove(keys: tuple[str, ...], as_json: bool, folder: str | None) -> None:
    """Remove the records whose keys begin with KEY.

    Each KEY must be the beginning of one key only; else nothing is removed.
    """
    store = opened(folder)
    records = found(store, *keys)
    with faults_refused():
        removed = store.remove({each.key for each in records})
    _tell(removed, store, as_json)


@click.command()
@click.option(
    "--older-than",
    type=_Age(),
    metavar="AGE",
    help="Remove records that are older than AGE: 12h, 30d, 8w.",
)
@click.option(
    "--other-versions",
    is_flag=True,
    help="Remove records of other versions of jax or jaxlib, and those that another autobatch "
    "wrote in another form.",
)
@json_option
@store_option
def prune(
    older_than: timedelta | None, other_versions: bool, as_json: bool, folder: str | None
) -> None:
    """Remove records that are old or cannot be used any more.

    With both options, either is reason enough.
    """
    if older_than is None and not other_versions:
        raise click.UsageError("Give --older-than, --other-versions or both.")
    store = opened(folder)
    now = datetime.now(UTC)
    installed = _installed() if other_versions else {}

    def stale(record: Record) -> bool:
        created = created_at(record)
        if older_than is not None and created is not None and now - created > older_than:
            return True
        return any(record.parts.get(name) != each for name, each in installed.items())

    with faults_refused():
        removed = store.prune(stale, other_schemas=other_versions)
    _tell(removed, store, as_json)


@click.command()
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
    with faults_refused():
        removed = store.clear()
    _tell(removed, store, as_json)


def can_ask() -> bool:
    """Returns whether a person is there to answer."""
    return sys.stdin.isatty()


def _installed() -> dict[str, str]:
    """Returns the versions that a record must have been made with to be used here.

    Raises:
        click.ClickException: one of the packages is not installed.
    """
    try:
        return {name: version(name) for name in ("jax", "jaxlib")}
    except PackageNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is not installed: nothing to compare with"
        ) from None


def _tell(removed: int, store: Store, as_json: bool) -> None:
    if as_json:
        echo_json({"removed": removed})
    else:
        click.echo(f"removed {counted(removed)} from {store.path}")
