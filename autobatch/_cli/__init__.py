"""The command `autobatch`. Each of its commands has a module, which is loaded when it is asked for.

Starting the command loads no jax, and `autobatch cache` never does.
"""

from __future__ import annotations

import warnings
from importlib import import_module

import click

from autobatch import __version__
from autobatch._errors import AutobatchWarning
from autobatch._report import printable

# Each is the object of that name in the module `_NAME` of this package.
_COMMANDS = ("cache", "demo", "doctor", "tune")


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return getattr(import_module(f"autobatch._cli._{cmd_name}"), cmd_name)


@click.group(cls=_LazyGroup)
@click.version_option(__version__, prog_name="autobatch", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """See what autobatch measured, chose and remembers.

    Exit codes: 0, 1 where something is not found, cannot be read or is refused, 2 for wrong usage,
    130 after Ctrl-C in `autobatch tune`.
    """
    context.with_resource(warnings.catch_warnings())
    warnings.simplefilter("always", AutobatchWarning)
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: object) -> None:
        if issubclass(category, AutobatchWarning):
            click.echo(printable(str(message)), err=True)
        else:
            show_others(message, category, *where)  # pyright: ignore[reportArgumentType]

    warnings.showwarning = show
