"""Writes `cli.md`, the reference of the command, out of the command itself: `make docs`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from autobatch._cli import main

PATH = Path(__file__).with_name("cli.md")

HEAD = """\
# The command

Written by `make docs` from the command itself. Every command takes `--help` too.
"""


def reference() -> str:
    """Returns the text of `cli.md`."""
    return "\n".join([HEAD, *_sections(main, click.Context(main, info_name="autobatch"))])


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yields the section of a command, then those of the commands in it."""
    path = context.command_path
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield f"## {path}\n\n```\n{usage}\n```\n"
    if command.help:
        yield f"{inspect.cleandoc(command.help)}\n"
    options = [each for each in command.params if isinstance(each, click.Option)]
    records = [each.get_help_record(context) for each in options]  # None of a hidden one
    rows = [f"| `{name}` | {text} |" for name, text in filter(None, records)]
    if rows:
        yield "\n".join(["| option | meaning |", "|---|---|", *rows, ""])
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None:
                yield from _sections(below, click.Context(below, parent=context, info_name=name))


if __name__ == "__main__":
    PATH.write_text(reference(), encoding="utf-8")
