"""autobatch: `jax.vmap` that measures how to map, chooses under a budget and remembers.

Public names only, loaded when first used, so that the command line starts without jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autobatch._api import autobatch
    from autobatch._choose import Budget, Plan
    from autobatch._errors import (
        AutobatchError,
        AutobatchWarning,
        IneligibleStrategyError,
        NoViableStrategyError,
        RecordMissError,
    )
    from autobatch._reductions import MEAN, SUM

__all__ = [
    "MEAN",
    "SUM",
    "AutobatchError",
    "AutobatchWarning",
    "Budget",
    "IneligibleStrategyError",
    "NoViableStrategyError",
    "Plan",
    "RecordMissError",
    "autobatch",
]

__version__ = "0.1.0"

_MODULES = {
    "autobatch": "_api",
    "Budget": "_choose",
    "Plan": "_choose",
    "SUM": "_reductions",
    "MEAN": "_reductions",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"autobatch.{_MODULES.get(name, '_errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
