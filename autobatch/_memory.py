"""How much memory a device has, and how much of it one call takes.

Every figure has its source here: the kernel, the cgroup, the device's allocator, XLA's plan.
Unknown is None, never 0. The upper bound that needs no run is in `_bound`; which figure decides
what is in `_tuner`.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from autobatch._record import PeakSource

T = TypeVar("T")

_PROC = Path("/proc/self")
_CGROUPS = Path("/sys/fs/cgroup")
FIRST_RUN_BYTES = 1 << 20
"""What the first run of an executable may map besides its buffers."""
LIBRARIES_BYTES = 8 << 20
"""What libraries may take in a process's first run, besides code, and never again: while they
generate the code, and to keep."""
CODE_BYTES = 16 << 20
"""Growth of a run is code up to this much. What else it maps of files may come after its peak."""
_WAIT_S, _MOST_WAITS = 1e-3, 30
"""How often memory is looked at while it is being freed."""
_ENTRY, _PRESENT = np.dtype(np.uint64), np.uint64(63)
"""An entry of `pagemap`, and its bit of pages that are in memory."""
_NO_LIMIT = 1 << 60
"""What cgroup v1 writes for "no limit" is a page short of 2**63."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of a device as its allocator or the kernel states it. None is unknown.

    Attributes:
        free_bytes: bytes that this process may still take.
        total_bytes: bytes that this process could have if it were alone.
    """

    free_bytes: int | None
    total_bytes: int | None


def device_memory(device: Any) -> DeviceMemory:
    """Returns the free and total bytes of `device`: for a CPU, of this process's host."""
    if device.platform == "cpu":
        return host_memory()
    stats = _allocator_stats(device)
    total, used = stats.get("bytes_limit"), stats.get("bytes_in_use")
    free = None if total is None or used is None else max(0, total - used)
    return DeviceMemory(free_bytes=free, total_bytes=total)


def host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> DeviceMemory:
    """Returns the memory of the machine, or of the container or process limit if that is less.

    Args:
        proc: the folder of this process under `/proc`.
        cgroups: where the cgroup file systems are mounted.
    """
    rooms = [_machine_room(proc), *_cgroup_rooms(proc, cgroups)]
    rooms += _address_space_room(proc)
    return DeviceMemory(
        free_bytes=max(0, min(free for free, _ in rooms)),
        total_bytes=min(total for _, total in rooms),
    )


def _machine_room(proc: Path) -> tuple[int, int]:
    """Returns free and total bytes of the machine.

    On Linux the kernel's own file says it in no time; importing psutil takes longer than all else
    that a first call with a record does about memory.
    """
    fields = dict(
        line.split(":", 1) for line in _read(proc.parent / "meminfo").splitlines() if ":" in line
    )
    free, total = (
        _number(fields.get(name, "").removesuffix("kB").strip())
        for name in ("MemAvailable", "MemTotal")
    )
    if free is not None and total is not None:
        return free * 1024, total * 1024
    import psutil

    machine = psutil.virtual_memory()
    return machine.available, machine.total


def _cgroup_rooms(proc: Path, cgroups: Path) -> list[tuple[int, int]]:
    """Returns free and total bytes of every memory cgroup above this process that has a limit."""
    rooms = []
    for line in _read(proc / "cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            mounts = (cgroups, cgroups / "unified")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mounts = (cgroups / "memory",)
        else:
            continue
        # Inside a container the path may name a group that its mount does not show; then the
        # mount itself is the group, and it ends the walk upwards in any case.
        parts = [each for each in path.split("/") if each not in ("", "..")]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                rooms += _cgroup_room(mount.joinpath(*parts[:depth]), *names)
    return rooms


def _cgroup_room(group: Path, limit: str, usage: str, reclaimable: str) -> list[tuple[int, int]]:
    total, used = _number(_read(group / limit)), _number(_read(group / usage))
    if total is None or used is None or total >= _NO_LIMIT:
        return []
    # The kernel drops cached files before it refuses memory, so they count as free.
    statistics = dict(
        line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines() if " " in line
    )
    return [(total - used + (_number(statistics.get(reclaimable, "")) or 0), total)]


def _address_space_room(proc: Path) -> list[tuple[int, int]]:
    """Returns free and total bytes under `ulimit -v`, where that is set.

    Half of what is left counts as free: libraries reserve address space that they do not touch
    (a convolution its unrolled patches, each thread its arena), and some abort where they are
    refused, which nobody can catch.
    """
    total, used = _address_space_limit(proc), _status_bytes(proc, "VmSize")
    return [] if total is None or used is None else [((total - used) // 2, total)]


def _address_space_limit(proc: Path) -> int | None:
    _, _, soft_limit = _read(proc / "limits").partition("Max address space")
    return _number((soft_limit.split() or [""])[0])  # "unlimited" is no number


def measured_growth(run: Callable[[], T], device: Any) -> tuple[T, int | None]:
    """Returns what `run` returned, and by how many bytes memory grew at its peak meanwhile.

    On a CPU this is the growth of the process, which includes what libraries allocate outside
    XLA's plan, but no code; it is exact to some pages per core. Memory that the C library kept
    from earlier calls, up to 32 MiB a block, can be used again without growth, so the figure is a
    lower bound: take the larger of it and XLA's plan. On other devices it is known only if the
    allocator's peak rose, since that cannot be reset.

    Args:
        run: runs once; must block until its results are there and return them, so that nothing
            is freed before the reading.
        device: where it runs.
    """
    if device.platform == "cpu":
        return process_growth(run)
    before = _allocator_stats(device)
    result = run()
    after = _allocator_stats(device)
    used = before.get("bytes_in_use")
    peaks = before.get("peak_bytes_in_use"), after.get("peak_bytes_in_use")
    if used is None or peaks[0] is None or peaks[1] is None or peaks[1] <= peaks[0]:
        return result, None
    return result, peaks[1] - used


def process_growth(run: Callable[[], T], proc: Path = _PROC) -> tuple[T, int | None]:
    """Returns what `run` returned and the growth of this process's resident memory, if known.

    Code that it loads or generates, up to `CODE_BYTES`, is left out: a process takes it once, and
    much the same with every strategy. Under `ulimit -v` it is the growth of the address space, if
    that is more. Only Linux can reset the high-water mark (`man 5 proc_pid_clear_refs`), and some
    containers do not let it be written.

    Args:
        run: as for `measured_growth`.
        proc: the folder of this process under `/proc`.
    """
    code = code_bytes(proc)  # reading it takes memory too, so first of all
    gc.collect(0)  # JAX lets go of host arrays when the collector runs, of whatever generation
    _give_back_heap()
    _await_frees(proc)
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return run(), None
    # The mark is read before and after, not the resident size before: the kernel batches its
    # counters per core, and one counter's error cancels where two would add.
    # Garbage that is collected meanwhile would be used again without growth.
    with no_garbage_collection(), _address_space_at_its_peak(proc) as size:
        before = _status_bytes(proc, "VmHWM")
        result = run()
        after = _status_bytes(proc, "VmHWM")
        peak = _status_bytes(proc, "VmPeak")
        code = min(code_bytes(proc) - code, CODE_BYTES)
    if before is None or after is None:
        return result, None
    growth = max(0, after - before - code)
    if size is not None and peak is not None:
        growth = max(growth, peak - size)
    return result, growth


def code_bytes(proc: Path = _PROC) -> int:
    """Returns the resident bytes of files, above all libraries, and of code made in memory.

    The kernel drops pages of a file before it refuses memory. Code in memory is what XLA compiled
    and what libraries compile at the first product or convolution; such mappings are executable
    and have no name, and `pagemap` says which of their pages are there (`man 5 proc_pid_pagemap`).

    Args:
        proc: the folder of this process under `/proc`.
    """
    resident = _status_bytes(proc, "RssFile") or 0
    with suppress(OSError, ValueError), (proc / "pagemap").open("rb") as pages:
        for line in _read(proc / "maps").splitlines():
            addresses, permissions, _, _, _, *name = line.split()
            if "x" in permissions and not name:
                start, end = (int(each, 16) // mmap.PAGESIZE for each in addresses.split("-"))
                pages.seek(start * _ENTRY.itemsize)
                entries = np.frombuffer(pages.read((end - start) * _ENTRY.itemsize), _ENTRY)
                resident += mmap.PAGESIZE * int(np.count_nonzero(entries >> _PRESENT))
    return resident


@contextmanager
def _address_space_at_its_peak(proc: Path) -> Iterator[int | None]:
    """Gives the bytes of address space from which its peak grows, under `ulimit -v`; else None.

    What is only reserved counts against that limit too. Its peak cannot be reset, so the address
    space is brought up to it by a mapping that takes no memory, but an eighth of the room at most,
    which the run then has not. What is still missing counts as growth, which is safe.
    """
    limit, size = _address_space_limit(proc), _status_bytes(proc, "VmSize")
    peak = _status_bytes(proc, "VmPeak")
    if limit is None or size is None or peak is None:
        yield None
        return
    missing = max(0, min(peak - size, (limit - size) // 8))
    try:
        held = mmap.mmap(-1, missing, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    except (OSError, ValueError):  # there is nothing to hold, or no room by now
        yield size
        return
    with held:
        yield size + missing


def _await_frees(proc: Path) -> None:
    """Waits while memory is being freed: XLA frees on threads of its own, after a call is done."""
    resident = _status_bytes(proc, "VmRSS") or 0
    for _ in range(_MOST_WAITS):
        time.sleep(_WAIT_S)
        before, resident = resident, _status_bytes(proc, "VmRSS") or 0
        if resident >= before:
            return


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps Python from collecting cycles, which takes time and frees memory at any moment."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _give_back_heap() -> None:
    """Hands free heap pages to the kernel, so that using them again shows as growth."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)


class Relief:
    """Gives free memory back while programs are timed in turn on a CPU.

    The C library keeps what is freed, in as many pieces as programs that alternate leave it in:
    several times what one of them needs. Called between runs, this hands free pages back once the
    process has grown by half of the limit, and again after as much growth that it cannot undo. Not
    sooner: the next run takes its pages anew, which costs time.

    Args:
        device: where programs run.
        limit_bytes: how far the process may grow from now on; None for any growth.
        proc: the folder of this process under `/proc`.
    """

    def __init__(self, device: Any, limit_bytes: int | None, proc: Path = _PROC) -> None:
        self._proc = proc
        self._step = None if limit_bytes is None or device.platform != "cpu" else limit_bytes // 2
        self._most = self._resident() + (self._step or 0)

    def __call__(self) -> None:
        """Hands free pages back where the limit asks for it."""
        if self._step is not None and self._resident() > self._most:
            _give_back_heap()
            if self._resident() > self._most:  # what is in use cannot be given back
                self._most = self._resident() + self._step

    def _resident(self) -> int:
        return _status_bytes(self._proc, "VmRSS") or 0


def planned_bytes(compiled: Any) -> int | None:
    """Returns the bytes of results and temporaries that XLA planned for an executable.

    Results that take the place of donated arguments count once. Generated code is left out: it
    is there from compiling on, for as long as the executable is, and no call adds to it.

    Args:
        compiled: a `jax.stages.Compiled`.
    """
    try:
        plan = compiled.memory_analysis()
        needs = plan.output_size_in_bytes + plan.temp_size_in_bytes - plan.alias_size_in_bytes
        return max(0, int(needs))
    except Exception:  # a backend without an analysis raises what it likes, or returns None
        return None


def peak_bytes(
    argument_bytes: int, planned: int | None, growth: int | None, platform: str = "cpu"
) -> tuple[int | None, PeakSource | None]:
    """Returns the memory of one call, arguments included, and where the figure is from.

    The larger of plan and growth counts. The plan misses what libraries allocate; growth misses
    what was allocated in memory that the process already had. Growth of a process that exceeds
    the plan by less than `FIRST_RUN_BYTES` says nothing: a first run also maps stacks and tables.

    Args:
        argument_bytes: bytes of the arguments.
        planned: results and temporaries as XLA planned them, or None.
        growth: measured growth beyond what was in use before, or None.
        platform: where growth was measured.

    Returns:
        The bytes, and the source of the larger figure: `"xla"` for the plan, also if they are
        equal; `"measured"` for growth of the process; `"device"` for growth that the device's
        allocator stated. Both are None if neither figure is known.

    >>> peak_bytes(1000, planned=4096, growth=0)
    (5096, 'xla')
    """
    noise = FIRST_RUN_BYTES if platform == "cpu" else 0
    if growth is not None and (planned is None or growth > planned + noise):
        return argument_bytes + growth, "measured" if platform == "cpu" else "device"
    if planned is None:
        return None, None
    return argument_bytes + planned, "xla"


def _allocator_stats(device: Any) -> dict[str, int]:
    try:
        return dict(device.memory_stats() or {})
    except Exception:  # devices without figures raise what they like
        return {}


def _status_bytes(proc: Path, name: str) -> int | None:
    for line in _read(proc / "status").splitlines():
        if line.startswith(f"{name}:"):
            kibibytes = _number(line.split()[1])
            return None if kibibytes is None else kibibytes * 1024
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
