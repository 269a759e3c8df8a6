"""What `autobatch tune` asks of its worker, as one line of JSON. Neither side is here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autobatch._record import Record, from_data, to_data


@dataclass(frozen=True, kw_only=True)
class Request:
    """One tuning.

    Attributes:
        target: the function, `MODULE:FUN`.
        in_axes, out_axes: of a plain function, as Python literals; None for what `jax.vmap` does.
        argnums: the arguments by which it is differentiated, without any the closed-over arrays;
            None to tune the call itself.
        arguments: dtype and shape of each argument that is made up; None to read `inputs`.
        inputs: the .npz file that holds the arguments.
        budget: the fields of `Budget` that replace the function's own.
        store: the folder of records that replaces the function's own.
        force: whether to measure although there is a record.
        run_s: most seconds that one run may take.
        known: what was known when a candidate ended the worker before.
    """

    target: str
    in_axes: str | None
    out_axes: str | None
    argnums: Sequence[int] | None
    arguments: Sequence[tuple[str, Sequence[int]]] | None
    inputs: str | None
    budget: dict[str, Any] = field(hash=False)
    store: str | None
    force: bool
    run_s: float
    known: Record | None = None

    @property
    def title(self) -> str:
        """What is tuned, for people."""
        return self.target if self.argnums is None else f"grad of {self.target}"

    def to_json(self) -> str:
        """Returns the request as one line."""
        data = asdict(replace(self, known=None))
        return json.dumps({**data, "known": self.known and to_data(self.known)})

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Returns the request that `to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "known": data["known"] and from_data(data["known"])})
