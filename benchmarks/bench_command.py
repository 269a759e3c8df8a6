"""How long does the command take to list few and many records?

Against importing the libraries that it is made of: click for commands, rich for tables.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from _common import median_and_spread, print_header, print_table, verdict, with_spread

from autobatch._digest import digest
from autobatch._record import Record, from_json
from autobatch._store import open_store

REPETITIONS = 7
LIBRARIES = "import click, rich.console, rich.table, rich.text"
RECORD = Path(__file__).parent / "record.json"


def records(count: int) -> Iterator[Record]:
    """Yields records of as many workloads, each with five outcomes."""
    record = from_json(RECORD.read_text())
    for number in range(count):
        parts = {**record.parts, "program": f"{number:064x}"}
        yield replace(record, key=digest(parts), parts=parts)


def seconds(*command: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    print_header("Listing records, in ms")
    rows = []
    for count in (10, 10_000):
        with tempfile.TemporaryDirectory() as folder:
            store = open_store(folder)
            assert store is not None
            store.merge(list(records(count)), lambda *_: True)
            listing = ("-m", "autobatch", "cache", "list", "--store", folder)
            importing, table, data = [], [], []
            for _ in range(REPETITIONS):
                importing.append(seconds("-c", LIBRARIES))
                table.append(seconds(*listing))
                data.append(seconds(*listing, "--json"))
        ratio = median_and_spread(table)[0] / median_and_spread(importing)[0]
        as_data = median_and_spread(data)[0]
        rows.append(
            [
                f"{count:,}",
                with_spread(importing, 0, 1e3),
                with_spread(table, 0, 1e3),
                f"{ratio:.2f}",
                verdict(ratio, 2.5) if count == 10 else "",
                with_spread(data, 0, 1e3),
                verdict(as_data, 2.0, " s") if count == 10_000 else "",
            ]
        )
    heads = ["records", "click and rich", "cache list", "ratio", "bar", "--json", "bar"]
    print_table(heads, rows)


if __name__ == "__main__":
    main()
