"""Records that come with an image: exported files that `AUTOBATCH_CACHE_PATH` names, read-only."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

from autobatch._errors import warn_once
from autobatch._exchange import MOST_BYTES, from_document, supersedes
from autobatch._record import Record


def shipped() -> Mapping[str, Record]:
    """Returns the records of all files that the environment names, by key.

    They are read once a process. A file that cannot be read, or is damaged, is passed over with a
    warning. Of two records of one key the wider search stays, then the newer.
    """
    return _read(os.environ.get("AUTOBATCH_CACHE_PATH", ""))


@functools.cache
def _read(paths: str) -> Mapping[str, Record]:
    records: dict[str, Record] = {}
    for path in filter(None, paths.split(os.pathsep)):
        for record in _records(Path(path)):
            kept = records.get(record.key)
            if kept is None or supersedes(record, kept):
                records[record.key] = record
    return records


def _records(path: Path) -> list[Record]:
    try:
        with path.open("rb") as file:
            return from_document(file.read(MOST_BYTES + 1))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        warn_once(
            f"AUTOBATCH_CACHE_PATH names {str(path)!r:.200}, which is passed over: {reason}. It "
            "must be a file that `autobatch cache export` wrote."
        )
        return []
