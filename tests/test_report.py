"""The table says what was chosen, what it costs and why the others lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records import KEY, make_limits, make_outcome, make_record

from autobatch._choose import Plan, Source, blank, choose, explained
from autobatch._record import Limits, Record
from autobatch._report import explain, explain_unmeasured
from autobatch._strategies import VMAP, Strategy


def plan_of(record: Record, limits: Limits, source: Source = "record") -> Plan:
    strategy = choose(record, limits) or VMAP
    outcomes = explained(record, limits, strategy)
    return Plan(strategy=strategy, source=source, outcomes=outcomes, key=record.key)


def table(record: Record, limits: Limits | None = None, source: Source = "tuned") -> str:
    limits = limits or record.searched
    return explain(record, plan_of(record, limits, source), limits)


def test_whole_table() -> None:
    assert table(make_record()).split("\n") == [
        "vector_dot   200 rows   cpu AMD EPYC, 2 cores   jax 0.12.0   tuned in 400 ms   "
        "key 3f9ac1d2",
        "   strategy     compile   run             peak      total at 1,000 calls",
        " > vmap         30.0 ms   45.2 us +-2 %   793 KiB   75.2 ms                "
        "chosen: least total within 2.0 GiB",
        "   chunked:50   58.0 ms   61.0 us +-3 %   793 KiB   119 ms                 "
        "1.6x  (lax.map batch_size=50)",
        "   map          78.0 ms   141 us  +-2 %   793 KiB   219 ms                 2.9x",
        "   unrolled     -         -               -         -                      "
        "compile predicted 2.3 s",
    ]


def first_words(text: str) -> list[str]:
    return [line.replace(">", "").split()[0] for line in text.split("\n")[2:]]


def test_plan_comes_first_and_the_unmeasured_last() -> None:
    record = make_record()
    assert first_words(table(record)) == ["vmap", "chunked:50", "map", "unrolled"]
    reverse = replace(record, outcomes=record.outcomes[::-1])
    assert first_words(table(reverse)) == ["vmap", "chunked:50", "map", "unrolled"]
    # The plan comes first even where its total is not the least.
    forced = replace(plan_of(record, record.searched), strategy=Strategy.parse("map"))
    lines = explain(record, forced, record.searched).split("\n")
    assert first_words("\n".join(lines)) == ["map", "vmap", "chunked:50", "unrolled"]
    assert [line for line in lines if line.startswith(" >")] == [lines[2]]


def test_totals_follow_the_expected_calls() -> None:
    text = table(make_record(), make_limits(expected_calls=1_000_000))
    assert "total at 1,000,000 calls" in text
    assert "45.2 s" in text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("tuned", "tuned in 400 ms"),
        ("synthetic", "tuned on made-up arrays in 400 ms"),
        ("record", "from the record of 2026-07-01T12:00:00+00:00"),
        ("nearest", "from the nearest record, of 2026-07-01T12:00:00+00:00"),
    ],
)
def test_title_says_where_the_plan_is_from(source: Source, words: str) -> None:
    assert f"   {words}   key 3f9ac1d2" in table(make_record(), source=source).split("\n")[0]


@pytest.mark.parametrize("parts", [{}, {"jax": 12}])
def test_title_without_versions(parts: dict[str, object]) -> None:
    assert "jax" not in table(make_record(parts=parts)).split("\n")[0]


def test_one_row() -> None:
    assert "   1 row   " in table(make_record(batch_size=1))


@pytest.mark.parametrize(("noise", "told"), [(0.25, True), (0.11, True), (0.1, False)])
def test_noise_is_told_when_it_is_loud(noise: float, told: bool) -> None:
    text = table(make_record(noise=noise))
    line = f"noisy: two measurements of one program differ by {noise:.0%}"
    assert (line in text) == told
    assert "noisy" not in table(make_record(noise=None))


def test_a_busy_machine_is_said() -> None:
    line = "noisy: other processes took 48% of the cores"
    assert line in table(make_record(load=0.48))
    assert "noisy" not in table(make_record(load=0.08))


def test_peaks_say_where_they_are_from() -> None:
    note = "* as XLA plans it, not measured"
    assert note not in table(make_record())
    planned = make_outcome("vmap", peak_source="xla")
    device = make_outcome("map", peak_source="device")
    bound = make_outcome("unrolled", status="over-memory", predicted_bytes=5 * 1024**3)
    text = table(make_record(outcomes=(planned, device, bound)))
    assert note in text
    assert text.count("793 KiB*") == 1
    assert "<= 5.0 GiB" in text


def test_names_cannot_steer_a_terminal() -> None:
    outcome = make_outcome("map", status="failed", reason="a\x1b[2J\nb")
    text = table(make_record(name="x\x1b[31m\ny", outcomes=(make_outcome("vmap"), outcome)))
    assert "\x1b" not in text
    assert "x?[31m?y" in text
    assert "a?[2J?b" in text
    assert len(text.split("\n")) == 4


def test_no_line_ends_in_blanks() -> None:
    assert [line for line in table(make_record()).split("\n") if line != line.rstrip()] == []


def unmeasured(source: Source, strategy: str, reason: str) -> list[str]:
    chosen = Strategy.parse(strategy)
    plan = Plan(strategy=chosen, source=source, outcomes=blank(reason, chosen), key=KEY)
    text = explain_unmeasured(
        plan, name="loss", batch_size=1024, device="cpu", versions="jax 0.12.0"
    )
    return text.split("\n")


def test_whole_table_without_measurements() -> None:
    assert unmeasured("forced", "chunked:64", "not tuned") == [
        "loss   1024 rows   cpu   jax 0.12.0   forced with strategy=   key 3f9ac1d2",
        "   strategy     peak",
        " > chunked:64   -      not tuned  (lax.map batch_size=64)",
        "   vmap         -      not tuned",
        "   map          -      not tuned",
        "   unrolled     -      not tuned",
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("estimate", "estimated, nothing was measured"),
        ("off", "tuning is off"),
        ("sole", "nothing to choose"),
    ],
)
def test_title_without_measurements(source: Source, words: str) -> None:
    assert f"   {words}   key" in unmeasured(source, "vmap", "")[0]


def test_bounds_stand_where_nothing_was_measured() -> None:
    bounded = make_outcome("vmap", status="unmeasured", predicted_bytes=3 * 1024**2)
    plan = Plan(strategy=VMAP, source="estimate", outcomes=(bounded,), key="")
    text = explain_unmeasured(plan, name="loss", batch_size=8, device="cpu", versions="")
    assert text.split("\n")[0] == "loss   8 rows   cpu   estimated, nothing was measured"
    assert "<= 3.0 MiB" in text
