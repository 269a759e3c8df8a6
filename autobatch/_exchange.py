"""Records as one document, to be carried to another store, and which of two records of a key stays.

The document may be anybody's: it is data, and taken whole or refused. Files and the store are not
touched here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, cast

from autobatch._digest import digest
from autobatch._record import SCHEMA, Limits, Record, created_at, from_data, to_data
from autobatch._units import format_bytes

MOST_BYTES = 256 * 1024**2
"""A larger document is not read; it would take many times its size to parse."""

_SCHEMA, _RECORDS = "autobatch-records", "records"
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


def to_document(records: Iterable[Record]) -> str:
    """Returns `records` as one document of JSON, a line for each, in the order of their keys.

    Raises:
        ValueError: `from_document` would refuse it; the message says why.
    """
    ordered = sorted(records, key=lambda each: each.key)
    lines = [
        json.dumps(to_data(_vetted(each)), sort_keys=True, allow_nan=False) for each in ordered
    ]
    text = f'{{"{_SCHEMA}": {SCHEMA}, "{_RECORDS}": [\n' + ",\n".join(lines) + "\n]}\n"
    if len(text) > MOST_BYTES:
        raise ValueError(f"the records together are more than {format_bytes(MOST_BYTES)}")
    return text


def from_document(document: bytes) -> list[Record]:
    """Returns the records that `to_document` wrote.

    Raises:
        ValueError: the document is damaged, foreign, too large or of another schema, or one of its
            records is bad, such as one whose key is not the digest of its parts.
    """
    if len(document) > MOST_BYTES:
        raise ValueError(f"more than {format_bytes(MOST_BYTES)}")
    try:
        data: Any = json.loads(document.decode())
        entries = _entries(data)
        return [_record(number, each) for number, each in enumerate(entries, start=1)]
    except RecursionError:
        raise ValueError("nested too deeply") from None


def supersedes(offered: Record, kept: Record) -> bool:
    """Returns whether `offered` is to take the place of `kept`, which has the same key.

    What was measured on real arrays beats what was on stand-ins. Then the wider search wins: the
    one none of whose limits is narrower, if one is wider; where the limits do not tell, the one
    that measured more candidates. Of equals the newer one wins, and `kept` stays if that is none.
    """
    if offered.data != kept.data:
        return offered.data == "real"
    ours, theirs = _extent(offered.searched), _extent(kept.searched)
    if ours != theirs:
        pairs = list(zip(ours, theirs, strict=True))
        if all(one >= other for one, other in pairs):
            return True
        if all(one <= other for one, other in pairs):
            return False
    return _weight(offered) > _weight(kept)


def _entries(data: Any) -> list[Any]:
    """Returns the records of a document, of which only the frame has been looked at."""
    if not isinstance(data, dict) or _SCHEMA not in data:
        raise ValueError("not an export of autobatch's records")
    frame = cast(dict[str, Any], data)
    schema, entries = frame[_SCHEMA], frame.get(_RECORDS)
    if type(schema) is not int or schema != SCHEMA:
        raise ValueError(f"records of schema {schema!r:.80}, where {SCHEMA} is needed")
    if set(frame) != {_SCHEMA, _RECORDS} or not isinstance(entries, list):
        raise ValueError("not an export of autobatch's records")
    return cast(list[Any], entries)


def _record(number: int, data: Any) -> Record:
    try:
        if not isinstance(data, dict):
            raise ValueError(f"not a record: {data!r:.80}")
        return _vetted(from_data(cast(dict[str, Any], data)))
    except ValueError as error:
        raise ValueError(f"record {number}: {error}") from None


def _vetted(record: Record) -> Record:
    """Returns `record` if it could have come out of a tuning."""
    if record.key != digest(record.parts):
        raise ValueError(f"the key {record.key!r:.80} is not the digest of its parts")
    if created_at(record) is None:
        raise ValueError(f"the time of {record.key!r:.80} is {record.created!r:.80}")
    return record


def _extent(limits: Limits) -> tuple[float, ...]:
    """Returns what a search was bounded by; no figure for the memory is no bound."""
    memory = math.inf if limits.memory_bytes is None else limits.memory_bytes
    return limits.expected_calls, limits.tuning_s, memory, limits.compile_s


def _weight(record: Record) -> tuple[int, datetime]:
    measured = sum(each.status == "measured" for each in record.outcomes)
    return measured, created_at(record) or _LONG_AGO
