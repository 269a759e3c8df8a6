"""A key is the digest of its parts, and the parts that make two keys differ are found."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch._digest import differing, digest

PARTS = st.dictionaries(
    st.sampled_from("abc"), st.sampled_from([None, True, 1, 1.0, "1", "x", [], [1], [True]])
)


def test_digest_stays_what_it_was() -> None:
    """Another one would make every stored record a miss."""
    parts = {"b": [1, None], "a": "\u00e9"}
    assert digest(parts) == "9b10bedce64e86a275540261fbe95bc6c195bfb10d5def7a5fc12eefcc7d0a87"


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_what_is_no_json_has_no_digest(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest({"part": number})


@given(PARTS, PARTS)
def test_keys_differ_where_a_part_does(one: dict[str, Any], other: dict[str, Any]) -> None:
    names = differing(one, other)
    assert (digest(one) == digest(other)) == (names == [])
    assert names == differing(other, one) == sorted(set(names))
    rest = [{name: each[name] for name in each if name not in names} for each in (one, other)]
    assert digest(rest[0]) == digest(rest[1])
