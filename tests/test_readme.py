"""The README's example runs, and its table has the shape of the real one."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.source

PATH = Path(__file__).parent.parent / "README.md"
README = PATH.read_text() if PATH.exists() else ""  # outside the source tree nothing here runs


BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def block(language: str) -> str:
    """Returns the first block in a language."""
    return next(text for name, text in BLOCKS if name == language)


def test_the_example_prints_such_a_table() -> None:
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        exec(compile(block("python"), "README.md", "exec"), names)
    shown, real = block("").splitlines(), printed.getvalue().splitlines()
    assert shown[0].split()[:3] == real[0].split()[:3] == ["settle", "128", "rows"]
    assert shown[1].split() == real[1].split()
    assert families(shown) == families(real)
    assert str(names["settle"].plan(*names["args"]).strategy) == "map"


def families(lines: list[str]) -> set[str]:
    """Returns the families of the table's strategies; which chunks are worth a try may vary."""
    found = [re.match(r"^ [ >] (vmap|map|unrolled|chunked):?\d* ", line) for line in lines]
    return {each[1] for each in found if each}


@pytest.mark.parametrize("library", ["diskcache", "psutil", "platformdirs", "click", "rich"])
def test_every_dependency_has_its_sentence(library: str) -> None:
    assert f"**{library}**" in README


def test_what_the_readme_calls_exists() -> None:
    from autobatch import Budget, autobatch

    batched: Any = autobatch(lambda params, x: x)
    for name in re.findall(r"score\.(\w+)\(", README):
        assert callable(getattr(batched, name))
    Budget(memory="2GiB", compile_s=30, tuning_s=60, expected_calls=10_000)
