"""The fixtures that other tests count on count right."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.dtypes
import numpy as np
import platformdirs
import pytest


def test_each_program_is_counted_once(count_compiles: Callable[[], int]) -> None:
    function = jax.jit(lambda x: x * x)
    before = count_compiles()
    for size in (2, 2, 3, 3):
        function(np.ones(size, np.float32))
    assert count_compiles() - before == 2


def test_store_is_the_tests_own(store_folder: Path, tmp_path: Path) -> None:
    assert os.environ["AUTOBATCH_CACHE_DIR"] == str(store_folder)
    assert store_folder.is_relative_to(tmp_path)


@pytest.mark.skipif(os.name != "posix" or os.uname().sysname != "Linux", reason="XDG is Linux's")
def test_default_folder_is_temporary_too(tmp_path: Path) -> None:
    assert platformdirs.user_cache_path("autobatch").is_relative_to(tmp_path)


def test_promotion_is_strict() -> None:
    with pytest.raises(ValueError, match="rank_promotion"):
        jax.jit(lambda x, y: x + y)(np.ones((2, 3), np.float32), np.ones(3, np.float32))
    with pytest.raises(jax.dtypes.TypePromotionError, match="strict"):
        jax.jit(lambda x, y: x + y)(np.ones(3, np.float32), np.ones(3, np.int32))
