"""Records shipped as files: found after the store, never written, passed over where damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autobatch import AutobatchWarning, RecordMissError, _recall, _shipped, autobatch
from autobatch._exchange import to_document
from autobatch._store import open_store


def fun(x: Any) -> Any:
    return x * 2


def rows(count: int = 8) -> Any:
    return np.ones((count, 3), np.float32)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A file with the record of `fun` for eight rows, which no store of the test holds."""
    folder = tmp_path / "elsewhere"
    autobatch(fun, store=folder).plan(rows())
    store = open_store(folder)
    assert store is not None
    path = tmp_path / "records.json"
    path.write_text(to_document(store.records()))
    _recall._KNOWN.clear()
    return path


@pytest.fixture(autouse=True)
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _shipped._read.cache_clear()


def test_a_shipped_record_serves_without_tuning(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecordMissError):
        autobatch(fun, tune="require").plan(rows())
    monkeypatch.setenv("AUTOBATCH_CACHE_PATH", str(exported))
    before = exported.read_bytes()
    assert autobatch(fun, tune="require").plan(rows()).source == "record"
    assert autobatch(fun, store=False).plan(rows()).source == "record"
    assert autobatch(fun, tune="cached").plan(rows(50)).source == "nearest"
    assert exported.read_bytes() == before


def test_the_store_comes_first(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBATCH_CACHE_PATH", str(exported))
    own = autobatch(fun).tune(rows())
    _recall._KNOWN.clear()
    found, _ = _recall.Recall(store=None).find(own.key)
    assert found is not None
    assert found != _shipped.shipped()[own.key]


def test_several_files_are_one_collection(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.json"
    record = next(iter(_shipped._read(str(exported)).values()))
    other.write_text(to_document([record]))
    both = f"{exported}{os.pathsep}{os.pathsep}{other}"
    monkeypatch.setenv("AUTOBATCH_CACHE_PATH", both)
    assert list(_shipped.shipped()) == [record.key]


@pytest.mark.parametrize("text", [None, "", "no json", '{"records": []}', "[" * 100_000])
def test_what_cannot_be_read_is_passed_over_with_one_warning(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "damaged.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("AUTOBATCH_CACHE_PATH", str(path))
    with pytest.warns(AutobatchWarning, match="AUTOBATCH_CACHE_PATH names .* passed over"):
        plan = autobatch(fun).plan(rows())
    assert plan.source == "tuned"
    assert autobatch(fun).plan(rows(9)).source == "tuned"  # and no second warning
