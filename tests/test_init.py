"""The public names, and what importing them costs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.resources import files

import pytest

import autobatch


def run_python(code: str, **environment: str) -> str:
    """Returns what a fresh interpreter prints for `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", autobatch.__all__)
def test_public_name_loads(name: str) -> None:
    assert getattr(autobatch, name) is not None
    assert name in dir(autobatch)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'autobatch' has no attribute 'vmap'"):
        _ = autobatch.vmap


def test_package_says_that_it_is_typed() -> None:
    assert files(autobatch).joinpath("py.typed").is_file()


@pytest.mark.parametrize("statement", ["import autobatch", "import autobatch._cli"])
def test_import_loads_no_jax(statement: str) -> None:
    code = f"{statement}; import sys; print(sorted({{'jax', 'jaxlib'}} & set(sys.modules)))"
    assert run_python(code) == "[]"


def test_decorating_starts_no_backend() -> None:
    # On a platform that does not exist jax raises as soon as a backend is asked for.
    code = """
from autobatch import autobatch
autobatch(lambda x: x)
import jax
try:
    jax.devices()
except RuntimeError:
    print("only now")
"""
    assert run_python(code, JAX_PLATFORMS="nowhere") == "only now"
