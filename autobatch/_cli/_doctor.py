"""`autobatch doctor`: what autobatch finds on this machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from autobatch import __version__
from autobatch._choose import Budget, resolve
from autobatch._cli._options import counted, echo_json, json_option, opened, store_option
from autobatch._exchange import MOST_BYTES, from_document
from autobatch._report import printable
from autobatch._units import format_bytes


@click.command()
@json_option
@store_option
def doctor(as_json: bool, folder: str | None) -> None:
    """Show the device, the versions, the memory limit and whether the store works.

    Also the files of records that AUTOBATCH_CACHE_PATH names, and whether they can be read.
    """
    store = opened(folder)
    problem = store.problem()
    facts: dict[str, Any] = {
        **_device(),
        "cores": _cores(),
        "versions": _versions(),
        "store": {
            "path": str(store.path),
            "writable": problem is None,
            "problem": problem,
            "records": len(store.records()) if problem is None else None,
        },
        "shipped": _shipped(),
    }
    if as_json:
        echo_json(facts)
        return
    limit = facts["memory_limit_bytes"]
    kept = f"writable, {facts['store']['records']} records" if problem is None else f"it {problem}"
    lines = [
        ("device", facts["device"] or f"none: {facts['problem']}"),
        ("cores", str(facts["cores"])),
        ("versions", ", ".join(f"{name} {found}" for name, found in facts["versions"].items())),
        ("memory limit", "none known" if limit is None else format_bytes(limit)),
        ("store", str(store.path)),
        ("", kept),
    ]
    for number, each in enumerate(facts["shipped"]):
        problem, records = each["problem"], each["records"]
        lines.append(("" if number else "shipped", each["path"]))
        lines.append(("", counted(records) if problem is None else f"cannot be read: {problem}"))
    for name, text in lines:
        click.echo(printable(f"{name:14}{text}"))


def _device() -> dict[str, Any]:
    """Returns the default device in words and the default memory limit there.

    Raises:
        click.ClickException: the variable that sets the limit does not hold one.
    """
    import jax

    from autobatch._memory import device_memory

    try:
        budget = Budget(memory=os.environ.get("AUTOBATCH_MEMORY") or None)
    except ValueError as error:
        raise click.ClickException(f"AUTOBATCH_MEMORY: {error}") from None
    try:
        devices = jax.devices()
    except RuntimeError as error:  # the platform that was asked for does not work here
        problem = " ".join(str(error).split())
        return {"device": None, "devices": 0, "memory_limit_bytes": None, "problem": problem}
    memory = device_memory(devices[0])
    limits = resolve(
        budget,
        free_bytes=memory.free_bytes,
        total_bytes=memory.total_bytes,
        argument_bytes=0,
    )
    return {
        "device": f"{devices[0].platform} {devices[0].device_kind}",
        "devices": len(devices),
        "memory_limit_bytes": limits.memory_bytes,
        "problem": None,
    }


def _shipped() -> list[dict[str, Any]]:
    """Returns each file that `AUTOBATCH_CACHE_PATH` names, in order, with its number of records."""
    paths = os.environ.get("AUTOBATCH_CACHE_PATH", "").split(os.pathsep)
    return [_shipped_file(Path(each)) for each in paths if each]


def _shipped_file(path: Path) -> dict[str, Any]:
    records = problem = None
    try:
        with path.open("rb") as file:
            records = len(from_document(file.read(MOST_BYTES + 1)))
    except OSError as error:
        problem = error.strerror
    except ValueError as error:
        problem = str(error)
    return {"path": str(path), "records": records, "problem": problem}


def _cores() -> int | None:
    """Returns how many cores this process may use; of the machine, where nothing says so."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "autobatch": __version__}
    for name in ("jax", "jaxlib", "diskcache"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
