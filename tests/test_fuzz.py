"""Whatever bytes the store's files hold: a miss, or the record that was put there."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import KEY, make_record

from autobatch._errors import AutobatchWarning
from autobatch._store import Store


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one record, as a process left it."""
    folder = tmp_path_factory.mktemp("filled") / "store"
    Store(folder).put(make_record())
    assert Store(folder).get(KEY) == make_record()
    return folder


@st.composite
def damage(draw: st.DrawFn) -> tuple[float, bytes, bool]:
    """Draws where in a file, what is written there, and whether the rest is cut off."""
    return draw(st.floats(0, 1)), draw(st.binary(max_size=64)), draw(st.booleans())


@settings(max_examples=100)
@given(blows=st.lists(st.tuples(st.integers(0, 9), damage()), min_size=1, max_size=6))
def test_damaged_files_are_a_miss_or_the_record(
    filled: Path, blows: list[tuple[int, tuple[float, bytes, bool]]]
) -> None:
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore", AutobatchWarning)
        folder = Path(temporary) / "store"
        shutil.copytree(filled, folder)
        files = sorted(each for each in folder.iterdir() if each.is_file())
        for number, (place, content, is_cut) in blows:
            path = files[number % len(files)]
            whole = path.read_bytes()
            at = int(place * len(whole))
            path.write_bytes(whole[:at] + content + (b"" if is_cut else whole[at + len(content) :]))
        store = Store(folder)
        assert store.get(KEY) in (None, make_record())
        assert store.records() in ([], [make_record()])
        store.put(make_record())  # which a broken one passes over, or begins anew
        assert store.get(KEY) in (None, make_record())
