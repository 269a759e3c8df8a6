"""What the environment says where the user's arguments are silent, read when it is needed."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal, get_args

from autobatch._choose import Budget

Mode = Literal["first-call", "cached", "require", "force", "off"]
MODES: tuple[Mode, ...] = get_args(Mode)


def mode_in_force(mode: Mode | None) -> Mode:
    """Returns the mode: the user's, else the environment's, else `first-call`.

    Raises:
        ValueError: `AUTOBATCH_TUNE` holds no mode.
    """
    return mode or checked_mode(os.environ.get("AUTOBATCH_TUNE") or "first-call")


def checked_mode(mode: object) -> Mode:
    """Returns `mode` if it is one.

    Raises:
        ValueError: it is none; the message names those that are.
    """
    for each in MODES:
        if mode == each:
            return each
    raise ValueError(f"tune (or AUTOBATCH_TUNE) must be one of {', '.join(MODES)}; got {mode!r}")


def budget_in_force(budget: Budget) -> Budget:
    """Returns the budget with the memory of `AUTOBATCH_MEMORY`, unless it has its own.

    Raises:
        ValueError: the variable holds no amount of memory.
    """
    memory = os.environ.get("AUTOBATCH_MEMORY")
    if budget.memory is not None or not memory:
        return budget
    try:
        return replace(budget, memory=int(memory) if memory.isdigit() else memory)
    except ValueError as error:
        raise ValueError(f"AUTOBATCH_MEMORY: {error}") from None
