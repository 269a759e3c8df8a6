"""`autobatch cache export|import`: records in a file, to be carried to another store."""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict
from pathlib import Path

import click

from autobatch._cli._options import (
    counted,
    echo_json,
    faults_refused,
    found,
    json_option,
    opened,
    recorded,
    store_option,
)
from autobatch._exchange import MOST_BYTES, from_document, supersedes, to_document
from autobatch._report import printable


@click.command("export")
@click.argument("file")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@json_option
@store_option
def export_records(file: str, keys: tuple[str, ...], as_json: bool, folder: str | None) -> None:
    """Write records to FILE; to standard output, and nothing else, if it is `-`.

    All records, or those whose keys begin with KEY. FILE is replaced if it is there.
    """
    store = opened(folder)
    records = found(store, *keys) if keys else recorded(store)
    if not records:
        raise click.ClickException(f"no records in {store.path}: nothing to export")
    chosen = {each.key: each for each in records}.values()
    try:
        document = to_document(chosen)
    except ValueError as error:
        what = f"nothing was exported: {error}. Name the KEYs to export, or remove what is bad."
        raise click.ClickException(printable(what)) from None
    if file == "-":
        click.echo(document, nl=False)
        return
    try:
        _replace(Path(file), document)
    except OSError as error:
        raise click.ClickException(printable(f"{file} cannot be written: {error}")) from None
    if as_json:
        echo_json({"exported": len(chosen), "path": file})
    else:
        click.echo(f"exported {counted(len(chosen))} to {printable(file)}")


@click.command("import")
@click.argument("file")
@json_option
@store_option
def import_records(file: str, as_json: bool, folder: str | None) -> None:
    """Take in the records of FILE, which `export` wrote; of standard input if it is `-`.

    All of them, or none if anything in FILE is wrong. Nothing in it is executed. Where a key is
    there already, one of the two records stays: that of real arrays before that of made-up ones,
    then that of the wider search, then the newer one.
    """
    store = opened(folder)
    try:
        with click.open_file(file, "rb") as stream:
            document = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise click.ClickException(printable(f"{file} cannot be read: {error}")) from None
    try:
        records = from_document(document)
    except ValueError as error:
        raise click.ClickException(printable(f"{file} was refused: {error}")) from None
    with faults_refused():
        merged = store.merge(records, supersedes)
    if as_json:
        echo_json(asdict(merged))
    else:
        told = f"{merged.added} added, {merged.replaced} replaced, {merged.kept} kept"
        click.echo(f"{told} in {store.path}")


def _replace(path: Path, text: str) -> None:
    """Puts a file that holds `text` in the place of `path`, whole or not at all.

    The umask says who may read it.

    Raises:
        OSError: it cannot be written, or `path` is something other than a file.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    if os.path.lexists(target) and not target.is_file():
        raise OSError("it is not a plain file")
    part = target.with_name(f".autobatch-{secrets.token_hex(8)}")
    stream = part.open("x", encoding="utf-8")
    try:
        with stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
