"""A plan with what it rests on, for the call that it was made for, and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from autobatch._choose import Plan
from autobatch._key import device_in_words
from autobatch._program import Prepared
from autobatch._record import Limits, Record
from autobatch._report import explain, explain_unmeasured


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, what it rests on, and the program that the tuning compiled, if there was one.

    It is kept for every shape, so it holds no jaxpr: that would keep constants alive.
    """

    plan: Plan
    record: Record | None = None
    limits: Limits | None = None
    program: Prepared | None = None

    def table(self, name: str, batch_size: int, device: Any) -> str:
        """Returns a table of every candidate.

        Args:
            name: what the workload is called.
            batch_size: rows of the call.
            device: the device that it runs on.
        """
        if self.record is not None and self.limits is not None:
            return explain(self.record, self.plan, self.limits)
        return explain_unmeasured(
            self.plan,
            name=name,
            batch_size=batch_size,
            device=device_in_words(device),
            versions=f"jax {jax.__version__}",
        )
