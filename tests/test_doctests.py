"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

import autobatch

MODULES = [
    each.name
    for each in pkgutil.walk_packages(autobatch.__path__, "autobatch.")
    if not each.name.endswith("__main__")
]


@pytest.mark.parametrize("name", ["autobatch", *MODULES])
def test_examples(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0
