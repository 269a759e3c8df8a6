"""The lock on a device is one process's at a time, and never an obstacle."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autobatch import _device_lock
from autobatch._device_lock import DeviceLock, device_lock

HOLD = """
import sys
from pathlib import Path
from autobatch._device_lock import DeviceLock
with DeviceLock(Path(sys.argv[1])).held(0.0) as is_held:
    print(is_held, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir(mode=0o700)
    return tmp_path / "store" / "device-cpu.lock"


@contextmanager
def held_by_another(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        yield child
        child.kill()


def in_thread(lock: DeviceLock) -> bool:
    """Returns whether another thread of this process gets the lock."""
    found: list[bool] = []

    def work() -> None:
        with lock.held(0.0) as is_held:
            found.append(is_held)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def test_another_process_waits_until_it_ends(path: Path) -> None:
    lock = DeviceLock(path)
    with held_by_another(path) as child:
        with lock.held(0.0) as is_held:
            assert not is_held
        with lock.held(2 * _device_lock.PAUSE_S) as is_held:
            assert not is_held
        child.kill()
        child.wait()
        with lock.held(60.0) as is_held:
            assert is_held


def test_a_thread_may_take_it_again_and_others_may_not(path: Path) -> None:
    lock = device_lock(path)
    assert device_lock(path) is lock
    with lock.held(0.0) as outer, lock.held(0.0) as inner:
        assert outer
        assert inner
        assert not in_thread(lock)
    assert in_thread(lock)


def test_it_is_let_go_at_an_error(path: Path) -> None:
    lock = DeviceLock(path)
    with pytest.raises(KeyboardInterrupt), lock.held(0.0):
        raise KeyboardInterrupt
    with DeviceLock(path).held(0.0) as is_held:
        assert is_held


def test_a_child_of_a_fork_does_not_keep_it(path: Path) -> None:
    # In a process of its own, since this one has jax's threads.
    code = """
import os, sys, time
from pathlib import Path
from autobatch._device_lock import DeviceLock
with DeviceLock(Path(sys.argv[1])).held(0.0):
    child = os.fork()
    if child == 0:
        time.sleep(600)
with DeviceLock(Path(sys.argv[1])).held(0.0) as is_held:
    print(is_held)
os.kill(child, 9)
"""
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"


def test_without_a_folder_there_is_no_lock(tmp_path: Path) -> None:
    with DeviceLock(tmp_path / "nothing" / "device-cpu.lock").held(60.0) as is_held:
        assert not is_held
    assert list(tmp_path.iterdir()) == []


def test_folder_that_others_may_write_is_not_used(path: Path) -> None:
    path.parent.chmod(0o777)
    with DeviceLock(path).held(60.0) as is_held:
        assert not is_held
    assert not path.exists()


def test_links_are_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with DeviceLock(path).held(60.0) as is_held:
        assert not is_held
    assert not (tmp_path / "elsewhere").exists()


def test_file_system_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    assert _device_lock.fcntl is not None
    monkeypatch.setattr(_device_lock.fcntl, "flock", refuse)
    with DeviceLock(path).held(60.0) as is_held:
        assert not is_held


def test_platform_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device_lock, "fcntl", None)
    with DeviceLock(path).held(60.0) as is_held:
        assert not is_held
