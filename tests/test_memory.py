"""Device memory, growth and plans, over fake devices and fake /proc and cgroup trees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autobatch import _memory
from autobatch._memory import (
    FIRST_RUN_BYTES,
    DeviceMemory,
    Relief,
    device_memory,
    host_memory,
    measured_growth,
    peak_bytes,
    planned_bytes,
    process_growth,
)

MIB = 1024**2
GIB = 1024**3


class FakeDevice:
    """A device whose allocator gives these figures, one set a question, then the last again."""

    platform = "gpu"

    def __init__(self, *stats: Any) -> None:
        self.stats = list(stats)

    def memory_stats(self) -> Any:
        stats = self.stats.pop(0) if len(self.stats) > 1 else self.stats[0]
        if isinstance(stats, Exception):
            raise stats
        return stats


CPU = SimpleNamespace(platform="cpu")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 16 GiB, 8 of them free, whose `/proc/self` and cgroups are under the path."""
    memory = SimpleNamespace(available=8 * GIB, total=16 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    (tmp_path / "proc").mkdir()
    return tmp_path


def host(root: Path) -> DeviceMemory:
    return host_memory(root / "proc", root / "cgroup")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_v2(group: Path, limit: str, used: int, cached: int = 0) -> None:
    write(group / "memory.max", f"{limit}\n")
    write(group / "memory.current", f"{used}\n")
    write(group / "memory.stat", f"anon 1\ninactive_file {cached}\n")


def test_without_limits_the_machine_is_the_host(machine: Path) -> None:
    assert host(machine) == DeviceMemory(free_bytes=8 * GIB, total_bytes=16 * GIB)


def test_a_cgroup_v2_limits_free_and_total(machine: Path) -> None:
    write(machine / "proc/cgroup", "0::/user/job\n")
    write_v2(machine / "cgroup/user/job", str(2 * GIB), used=GIB)
    assert host(machine) == DeviceMemory(free_bytes=GIB, total_bytes=2 * GIB)


def test_a_limit_above_the_machine_does_not_count(machine: Path) -> None:
    write(machine / "proc/cgroup", "0::/job\n")
    write_v2(machine / "cgroup/job", str(64 * GIB), used=GIB)
    assert host(machine) == DeviceMemory(free_bytes=8 * GIB, total_bytes=16 * GIB)


def test_cached_files_count_as_free(machine: Path) -> None:
    write(machine / "proc/cgroup", "0::/job\n")
    write_v2(machine / "cgroup/job", str(2 * GIB), used=2 * GIB, cached=GIB // 2)
    assert host(machine).free_bytes == GIB // 2


def test_the_tightest_group_of_the_hierarchy_counts(machine: Path) -> None:
    write(machine / "proc/cgroup", "0::/slice/job\n")
    write_v2(machine / "cgroup/slice", str(3 * GIB), used=2 * GIB + GIB // 2)
    write_v2(machine / "cgroup/slice/job", "max", used=GIB)
    assert host(machine) == DeviceMemory(free_bytes=GIB // 2, total_bytes=3 * GIB)


@pytest.mark.parametrize("path", ["/", "/../../outside", "/docker/not-mounted-here"])
def test_a_container_sees_its_group_at_the_mount(machine: Path, path: str) -> None:
    write(machine / "proc/cgroup", f"0::{path}\n")
    write_v2(machine / "cgroup", str(2 * GIB), used=GIB)
    assert host(machine) == DeviceMemory(free_bytes=GIB, total_bytes=2 * GIB)


def write_v1(group: Path, limit: int, used: int, cached: int = 0) -> None:
    write(group / "memory.limit_in_bytes", f"{limit}\n")
    write(group / "memory.usage_in_bytes", f"{used}\n")
    write(group / "memory.stat", f"inactive_file 0\ntotal_inactive_file {cached}\n")


def test_a_cgroup_v1_limits_free_and_total(machine: Path) -> None:
    write(machine / "proc/cgroup", "5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/\n")
    write_v1(machine / "cgroup/memory/a/b", 2 * GIB, used=GIB, cached=GIB // 4)
    write_v1(machine / "cgroup/memory/a", 4 * GIB, used=GIB)
    assert host(machine) == DeviceMemory(free_bytes=GIB + GIB // 4, total_bytes=2 * GIB)


def test_cgroup_v1_without_a_limit(machine: Path) -> None:
    write(machine / "proc/cgroup", "4:memory:/\n")
    write_v1(machine / "cgroup/memory", 9223372036854771712, used=GIB)
    assert host(machine) == DeviceMemory(free_bytes=8 * GIB, total_bytes=16 * GIB)


def test_damaged_files_limit_nothing(machine: Path) -> None:
    write(machine / "proc/cgroup", "0::/job\n")
    write_v2(machine / "cgroup/job", "a lot", used=GIB)
    write(machine / "proc/limits", "Max address space\n")
    assert host(machine) == DeviceMemory(free_bytes=8 * GIB, total_bytes=16 * GIB)


def test_an_exceeded_limit_leaves_nothing(machine: Path) -> None:
    write(machine / "proc/cgroup", "0::/job\n")
    write_v2(machine / "cgroup/job", str(GIB), used=2 * GIB)
    assert host(machine) == DeviceMemory(free_bytes=0, total_bytes=GIB)


@pytest.mark.parametrize(
    ("soft", "expected"),
    [
        (str(4 * GIB), DeviceMemory(free_bytes=3 * GIB // 2, total_bytes=4 * GIB)),
        ("unlimited", DeviceMemory(free_bytes=8 * GIB, total_bytes=16 * GIB)),
    ],
)
def test_a_limit_on_address_space(machine: Path, soft: str, expected: DeviceMemory) -> None:
    write(
        machine / "proc/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max address space         {soft:<20} unlimited            bytes     \n",
    )
    write(machine / "proc/status", f"Name:\tpython\nVmSize:\t {GIB // 1024} kB\n")
    assert host(machine) == expected


@pytest.mark.parametrize(("limit", "growth"), [("unlimited", 0), (str(GIB), 4096)])
def test_under_a_limit_on_address_space_what_is_reserved_counts(
    tmp_path: Path, limit: str, growth: int
) -> None:
    write(tmp_path / "clear_refs", "")
    write(tmp_path / "limits", f"Max address space         {limit}        unlimited  bytes\n")
    status = "VmHWM:\t 8 kB\nVmRSS:\t 8 kB\nVmSize:\t 100 kB\nVmPeak:\t {peak} kB\n"
    write(tmp_path / "status", status.format(peak=100))
    run = lambda: write(tmp_path / "status", status.format(peak=104))  # noqa: E731
    assert process_growth(run, tmp_path) == (None, growth)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these figures")
def test_address_space_of_earlier_work_is_no_growth() -> None:
    program = """
import mmap, resource
from pathlib import Path
from autobatch._memory import process_growth

def reserve(mib):
    mmap.mmap(-1, mib << 20, prot=0).close()

def growth(mib):
    return process_growth(lambda: reserve(mib))[1] >> 20

def near(mib, expected):  # an arena of the interpreter is a mebibyte
    return expected <= mib <= expected + 4

size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (2048 << 20), hard))
reserve(100)
print([near(growth(mib), mib) for mib in (1, 20, 1, 40)])
reserve(1400)
print(1000 <= growth(1) <= 1300)
reserve(2000)
"""
    in_child(program, "[True, True, True, True]\nTrue\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these figures")
def test_code_is_no_growth() -> None:
    program = """
import mmap, os
from importlib.util import find_spec
from pathlib import Path
from autobatch._memory import process_growth

MIB = 1 << 20
folder = Path(find_spec("jaxlib").origin).parent
library = max(folder.rglob("*.so"), key=lambda each: each.stat().st_size)
held = []

def of_library(mib):
    with library.open("rb") as opened:
        held.append(mmap.mmap(opened.fileno(), mib * MIB, access=mmap.ACCESS_READ))
    bytes(held[-1][:: mmap.PAGESIZE])

def of_memory(mib, permissions=0):
    protection = mmap.PROT_READ | mmap.PROT_WRITE | permissions
    held.append(mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE, prot=protection))
    for page in range(0, mib * MIB, mmap.PAGESIZE):
        held[-1][page] = 1

for run in (
    lambda: of_library(12),
    lambda: of_memory(12, mmap.PROT_EXEC),
    lambda: of_memory(12),
    lambda: of_library(40),
    lambda: of_memory(40, mmap.PROT_EXEC),
):
    print(round(process_growth(run)[1] / MIB / 4), end=" ")
"""
    in_child(program, "0 0 3 6 6 ")  # beyond 16 MiB it is counted


def in_child(program: str, printed: str) -> None:
    """Asserts what a program prints, in a process of its own, where growth can be measured."""
    if process_growth(lambda: None)[1] is None:
        pytest.skip("the high-water mark cannot be reset")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.returncode) == (printed, 0), done.stderr


def test_free_pages_are_given_back_where_half_of_the_limit_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []

    def resident(mib: int) -> None:
        write(tmp_path / "status", f"VmRSS:\t {mib * 1024} kB\n")

    def give_back(left: int) -> None:
        given_back.append(left)
        resident(left)

    resident(100)
    relieve = Relief(CPU, 50 * MIB, tmp_path)
    for taken, left, given in [(125, 0, []), (126, 110, [110]), (126, 126, [110, 126])]:
        monkeypatch.setattr(_memory, "_give_back_heap", lambda left=left: give_back(left))
        resident(taken)
        relieve()
        assert given_back == given
    resident(151)  # 126 are in use
    relieve()
    assert len(given_back) == 2
    resident(152)
    relieve()
    assert len(given_back) == 3


@pytest.mark.parametrize(("platform", "limit"), [("cpu", None), ("gpu", MIB)])
def test_without_a_limit_of_the_process_nothing_is_given_back(
    platform: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_memory, "_give_back_heap", lambda: pytest.fail("given back"))
    write(tmp_path / "status", "VmRSS:\t 0 kB\n")
    relieve = Relief(SimpleNamespace(platform=platform), limit, tmp_path)
    write(tmp_path / "status", f"VmRSS:\t {GIB} kB\n")
    relieve()


def test_this_machine_has_memory() -> None:
    memory = device_memory(CPU)
    assert memory.free_bytes is not None
    assert memory.total_bytes is not None
    assert 0 < memory.free_bytes <= memory.total_bytes


@pytest.mark.parametrize(
    ("stats", "free", "total"),
    [
        ({"bytes_limit": 10 * GIB, "bytes_in_use": 4 * GIB}, 6 * GIB, 10 * GIB),
        ({"bytes_limit": 10 * GIB}, None, 10 * GIB),
        ({"bytes_in_use": 4 * GIB}, None, None),
        ({}, None, None),
        (None, None, None),
        (NotImplementedError("no figures"), None, None),
    ],
)
def test_a_device_says_what_it_knows(stats: Any, free: int | None, total: int | None) -> None:
    assert device_memory(FakeDevice(stats)) == DeviceMemory(free_bytes=free, total_bytes=total)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"bytes_in_use": 100, "peak_bytes_in_use": 150}, {"peak_bytes_in_use": 180}, 80),
        ({"bytes_in_use": 100, "peak_bytes_in_use": 150}, {"peak_bytes_in_use": 150}, None),
        ({"bytes_in_use": 100}, {"peak_bytes_in_use": 150}, None),
        ({"peak_bytes_in_use": 150}, {"peak_bytes_in_use": 180}, None),
        (None, None, None),
        (NotImplementedError("no figures"), None, None),
    ],
)
def test_growth_of_a_device_is_known_if_its_peak_rose(
    before: Any, after: Any, expected: int | None
) -> None:
    assert measured_growth(lambda: "result", FakeDevice(before, after)) == ("result", expected)


def test_growth_is_the_rise_of_the_high_water_mark(tmp_path: Path) -> None:
    def run() -> str:
        (tmp_path / "status").write_text("VmHWM:\t 1500 kB\nVmRSS:\t 900 kB\n")
        return "result"

    (tmp_path / "status").write_text("VmHWM:\t 1000 kB\nVmRSS:\t 998 kB\n")
    assert process_growth(run, tmp_path) == ("result", 500 * 1024)
    assert (tmp_path / "clear_refs").read_text() == "5"


def test_growth_is_unknown_where_the_mark_cannot_be_reset(tmp_path: Path) -> None:
    assert process_growth(lambda: "result", tmp_path / "missing") == ("result", None)


def test_growth_is_unknown_where_there_is_no_mark(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmRSS:\t 998 kB\n")
    assert process_growth(lambda: "result", tmp_path) == ("result", None)


def test_what_the_run_raises_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        measured_growth(lambda: 1 / 0, CPU)


def test_it_runs_once() -> None:
    runs: list[None] = []
    measured_growth(lambda: runs.append(None), CPU)
    measured_growth(lambda: runs.append(None), FakeDevice(None))
    assert len(runs) == 2


CHILD = """
import types
import jax, numpy as np
from autobatch._memory import measured_growth

rows = jax.device_put(np.ones(2**24, np.float32))
add = jax.jit(lambda x: x + 1).lower(rows).compile()
device = jax.devices()[0]
jax.block_until_ready(add(rows))  # a first run also loads code
for _ in range(3):
    result, growth = measured_growth(lambda: jax.block_until_ready(add(rows)), device)
    del result
    print(growth)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the high-water mark")
def test_growth_of_a_known_array() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=120
    )
    figures = child.stdout.split()
    if "None" in figures:
        pytest.skip("this kernel does not reset the high-water mark")
    assert [int(each) for each in figures] == pytest.approx([64 * MIB] * 3, rel=0.1)


def compiled(**sizes: int) -> Any:
    plan = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    return SimpleNamespace(memory_analysis=lambda: plan)


def test_a_plan_counts_results_and_temporaries_less_what_is_aliased() -> None:
    assert planned_bytes(compiled(output=100, temp=50, alias=30, generated_code=999)) == 120
    assert planned_bytes(compiled(output=100, temp=0, alias=100)) == 0


def test_no_plan() -> None:
    def refuse() -> Any:
        raise NotImplementedError("no analysis")

    assert planned_bytes(SimpleNamespace(memory_analysis=refuse)) is None
    assert planned_bytes(SimpleNamespace(memory_analysis=lambda: None)) is None
    assert planned_bytes(compiled(output=100)) is None


@pytest.mark.parametrize(
    ("planned", "growth", "platform", "expected"),
    [
        (5 * MIB, 7 * MIB, "cpu", (8 * MIB, "measured")),
        (5, 7, "gpu", (MIB + 7, "device")),
        (7, 5, "cpu", (MIB + 7, "xla")),
        (7, 7, "gpu", (MIB + 7, "xla")),
        (7, None, "cpu", (MIB + 7, "xla")),
        (None, 7, "cpu", (MIB + 7, "measured")),
        (None, 0, "cpu", (MIB, "measured")),
        (0, 0, "cpu", (MIB, "xla")),
        (None, None, "cpu", (None, None)),
    ],
)
def test_the_larger_figure_is_the_peak(
    planned: int | None, growth: int | None, platform: str, expected: tuple[Any, Any]
) -> None:
    assert peak_bytes(MIB, planned, growth, platform) == expected


def test_growth_of_a_process_exceeds_the_plan_by_more_than_a_first_run_maps() -> None:
    most = 5 * MIB + FIRST_RUN_BYTES
    assert peak_bytes(0, 5 * MIB, most, "cpu") == (5 * MIB, "xla")
    assert peak_bytes(0, 5 * MIB, most + 1, "cpu") == (most + 1, "measured")


def test_importing_it_imports_neither_jax_nor_psutil() -> None:
    code = f"import sys, {_memory.__name__}; print({{'jax', 'psutil'}} & set(sys.modules))"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert child.stdout.strip() == "set()"
