"""Does the store stand many processes, killed ones, and damaged bytes?

Cold processes of one workload start together; others are killed in the middle of a tuning, and the
next one has to go on; and the database is damaged at random before it is read and written.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import shutil
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import median_and_spread, print_header, print_table, verdict

from autobatch import _recall, autobatch
from autobatch._lease import LASTS_S
from autobatch._store import Store

PROCESSES, TIMES = 32, 5
TUNINGS_MOST = 2
KILLS = 20
DAMAGES = 1000
IN_AXES = (None, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one call of a process came to."""

    source: str
    is_right: bool
    seconds: float
    warned: int
    error: str = ""


def settle(matrix: Any, x: Any, heavy: Any) -> Any:
    """Seldom has much to do; its tuning takes about a second."""
    step = lambda _, y: jnp.tanh(matrix @ y)  # noqa: E731
    return jax.lax.cond(heavy, lambda x: jax.lax.fori_loop(0, 200, step, x), lambda x: x, x)


def arguments() -> tuple[Any, ...]:
    x = np.linspace(0, 1, 128 * 100, dtype=np.float32).reshape(128, 100)
    return np.eye(100, dtype=np.float32) / 2, x, np.arange(128) % 64 == 0


@functools.cache
def right_results() -> np.ndarray[Any, Any]:
    return np.asarray(jax.jit(jax.vmap(settle, IN_AXES))(*arguments()))


def small(x: Any) -> Any:
    return jnp.tanh(x).sum()


def call_once(store: str, expected: Any, pipe: Connection) -> None:
    """Child: tells that it is ready, and calls when it is told to; then tells what came of it."""
    args = arguments()
    batched = autobatch(settle, IN_AXES, store=store)
    pipe.send("ready")
    pipe.recv()
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = np.asarray(batched(*args))
            elapsed = time.perf_counter() - start
            call = Call(
                source=batched.plan(*args).source,
                is_right=bool(np.allclose(found, expected, rtol=1e-3, atol=1e-4)),
                seconds=elapsed,
                warned=len(caught),
            )
        except BaseException as error:
            call = Call(source="", is_right=False, seconds=0.0, warned=0, error=repr(error))
    pipe.send(call)


class Child:
    """A process that calls once, when it is told to."""

    def __init__(self, context: Any, store: Path) -> None:
        self._pipe, theirs = context.Pipe()
        args = (str(store), right_results(), theirs)
        self.process = context.Process(target=call_once, args=args)
        self.process.start()
        theirs.close()

    def get_ready(self) -> None:
        assert self._pipe.recv() == "ready"

    def go(self) -> None:
        self._pipe.send("go")

    def told(self) -> Call:
        try:
            return self._pipe.recv()
        except EOFError:
            return Call(source="", is_right=False, seconds=0.0, warned=0, error="it died")
        finally:
            self.process.join()


def together(context: Any, folder: Path) -> tuple[list[Call], int]:
    """Returns what became of many cold processes that call at once, and the records they left."""
    children = [Child(context, folder) for _ in range(PROCESSES)]
    for each in children:
        each.get_ready()
    for each in children:
        each.go()
    calls = [each.told() for each in children]
    return calls, len(Store(folder).records())


def alone(context: Any, folder: Path, kill_after_s: float | None = None) -> Call | None:
    """Returns what became of one call; None if it was killed before it had told."""
    child = Child(context, folder)
    child.get_ready()
    child.go()
    if kill_after_s is None:
        return child.told()
    time.sleep(kill_after_s)
    child.process.kill()
    child.process.join()
    return None


def damaged(pristine: bytes, rng: random.Random) -> bytes:
    """Returns the database with some bytes flipped, overwritten, cut off or added."""
    data = bytearray(pristine)
    at = rng.randrange(len(data))
    match rng.choice(["flip", "overwrite", "zero", "truncate", "append"]):
        case "flip":
            for _ in range(rng.choice([1, 1, 4, 64])):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case "overwrite":
            length = min(rng.choice([1, 16, 512, 4096]), len(data) - at)
            data[at : at + length] = rng.randbytes(length)
        case "zero":
            page = at // 4096 * 4096
            data[page : page + 4096] = bytes(len(data[page : page + 4096]))
        case "truncate":
            del data[at:]
        case "append":
            data += rng.randbytes(rng.choice([1, 4096]))
    return bytes(data)


def fuzz(folder: Path) -> tuple[Counter[str], list[str], int]:
    """Returns the sources of the plans out of damaged stores, exceptions, and wrong results."""
    x = np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3)
    expected = np.asarray(jax.jit(jax.vmap(small))(x))
    autobatch(small, store=folder)(x)
    (record,) = Store(folder).records()
    database = folder / "cache.db"
    pristine = database.read_bytes()
    sources, errors, wrong = Counter[str](), list[str](), 0
    rng = random.Random(0)
    for number in range(DAMAGES):
        _recall._KNOWN.clear()
        Path(f"{database}-journal").unlink(missing_ok=True)
        database.write_bytes(damaged(pristine, rng))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                batched = autobatch(small, tune="cached", store=folder)
                found = np.asarray(batched(x))
                wrong += not np.allclose(found, expected, rtol=1e-5)
                sources[batched.plan(x).source] += 1
                store = Store(folder)
                store.change_lease(record.key, lambda text: text or "damaged", create=True)
                store.put(record)
                kept = store.get(record.key)
                wrong += kept is not None and kept != record
                store.records()
                store.clear()
        except Exception as error:
            errors.append(f"{number}: {error!r}")
    return sources, errors, wrong


def counted(count: int, most: int) -> str:
    return f"{count} (<= {most}{' missed' if count > most else ''})"


def main() -> None:
    # Its server imports these, starts no backend, and forks.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jax", "autobatch._api", "autobatch._tuner"])
    print_header("The store under many processes, killed ones, and damage")
    rows: list[list[str]] = []
    folders = Path(tempfile.mkdtemp())
    try:
        tuning_s: list[float] = []
        for number in range(TIMES):
            calls, records = together(context, folders / f"together{number}")
            tuned = [each.seconds for each in calls if each.source == "tuned"]
            tuning_s += tuned
            rows.append(
                [
                    f"{PROCESSES} cold processes at once",
                    counted(len(tuned), TUNINGS_MOST),
                    counted(sum(bool(each.error) or bool(each.warned) for each in calls), 0),
                    counted(sum(not each.is_right for each in calls), 0),
                    f"{records}" + (" missed" if records != 1 else ""),
                    f"{max(each.seconds for each in calls):.1f}",
                    "",
                ]
            )
            for each in {each.error for each in calls if each.error}:
                print(each)

        rng = random.Random(0)
        usual = alone(context, folders / "usual")
        assert usual is not None
        after: list[Call] = []
        records = 0
        for number in range(KILLS):
            folder = folders / f"killed{number}"
            alone(context, folder, kill_after_s=rng.uniform(0, 1.2 * usual.seconds))
            call = alone(context, folder)
            assert call is not None
            after.append(call)
            records += len(Store(folder).records()) == 1
            if call.error:
                print(call.error)
        worst = max(each.seconds for each in after)
        rows.append(
            [
                f"the next after kill -9, {KILLS} times",
                str(sum(each.source == "tuned" for each in after)),
                counted(sum(bool(each.error) or bool(each.warned) for each in after), 0),
                counted(sum(not each.is_right for each in after), 0),
                f"{records}" + (" missed" if records != KILLS else ""),
                f"{worst:.1f}",
                verdict(worst - usual.seconds, LASTS_S, " s more"),
            ]
        )
        sources, errors, wrong = fuzz(folders / "damaged")
        for each in errors[:10]:
            print(each)
        told = ", ".join(f"{count} {source}" for source, count in sources.most_common())
        rows.append(
            [
                f"damaged {DAMAGES} times ({told})",
                "",
                counted(len(errors), 0),
                counted(wrong, 0),
                "",
                "",
                "",
            ]
        )
    finally:
        shutil.rmtree(folders)
    columns = ["what", "tunings", "faults", "wrong", "records", "longest call in s", "bar"]
    print_table(columns, rows)
    alone_s, tuned_s = f"{usual.seconds:.1f}", f"{median_and_spread(tuning_s)[0]:.1f}"
    print(f"\na tuning took {alone_s} s with nobody else there, {tuned_s} s among {PROCESSES}")


if __name__ == "__main__":
    main()
