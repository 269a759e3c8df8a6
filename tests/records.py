"""Records for tests, made without measuring."""

from __future__ import annotations

from typing import Any

from autobatch._record import Facts, Limits, Outcome, Record
from autobatch._strategies import Strategy

KEY = "3f9ac1d2" * 8


def make_outcome(strategy: str, **overrides: Any) -> Outcome:
    """Returns an outcome of `strategy`; measured unless `status` says otherwise."""
    status = overrides.pop("status", "measured")
    measured = {
        "compile_s": 0.030,
        "run_s": 45.2e-6,
        "run_mad_s": 0.9e-6,
        "samples": 20,
        "peak_bytes": 812_000,
        "peak_source": "measured",
    }
    figures = measured if status == "measured" else {"reason": status}
    parsed = Strategy.parse(strategy)
    return Outcome(strategy=parsed, status=status, **{**figures, **overrides})


def make_facts(**overrides: Any) -> Facts:
    """Returns the facts of 200 rows of a thousand floats, none of which are branched on."""
    default = {
        "argument_bytes": 804_000,
        "mapped_bytes": 800_000,
        "output_bytes": 800,
        "working_bytes": 800_000,
        "equations": 12,
        "depends_on_values": False,
    }
    return Facts(**{**default, **overrides})


def make_limits(**overrides: Any) -> Limits:
    """Returns 2 GiB, a minute for each compile and for the tuning, 1000 calls."""
    default = {
        "memory_bytes": 2 * 1024**3,
        "memory_is_explicit": True,
        "compile_s": 60.0,
        "tuning_s": 60.0,
        "expected_calls": 1000,
    }
    return Limits(**{**default, **overrides})


def make_record(key: str = KEY, **overrides: Any) -> Record:
    """Returns a record in which `vmap` is the best of four."""
    default: dict[str, Any] = {
        "parts": {"jax": "0.12.0", "jaxlib": "0.12.0"},
        "name": "vector_dot",
        "batch_size": 200,
        "device": "cpu AMD EPYC, 2 cores",
        "created": "2026-07-01T12:00:00+00:00",
        "facts": make_facts(),
        "outcomes": (
            make_outcome("vmap"),
            make_outcome("map", compile_s=0.078, run_s=141e-6, run_mad_s=2.8e-6),
            make_outcome("chunked:50", compile_s=0.058, run_s=61e-6, run_mad_s=1.8e-6),
            make_outcome("unrolled", status="not-worth", reason="compile predicted 2.3 s"),
        ),
        "searched": make_limits(),
        "noise": 0.01,
        "tuned_in_s": 0.4,
    }
    return Record(key=key, **{**default, **overrides})
