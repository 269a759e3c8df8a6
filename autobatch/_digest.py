"""The key of named parts: their digest, and where the parts of two keys differ.

What the parts of a workload are is in `_key`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def digest(parts: Mapping[str, Any]) -> str:
    """Returns the key: the SHA-256 of the canonical JSON of `parts`, in hex.

    Raises:
        ValueError: a part is no JSON, such as an infinite number.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the names of the parts that are not the same in two keys, sorted.

    >>> differing({"jax": "0.12.0", "x64": True}, {"jax": "0.12.0", "x64": 1, "cores": 2})
    ['cores', 'x64']
    """

    def alone(parts: Mapping[str, Any], name: str) -> str | None:
        return digest({name: parts[name]}) if name in parts else None

    return sorted(name for name in {*one, *other} if alone(one, name) != alone(other, name))
