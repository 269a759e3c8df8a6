"""A folder that only this user can have written, and the reasons not to use one.

What is kept in the folder, and how, is in `_store`.
"""

from __future__ import annotations

import os
import shlex
import stat
from contextlib import suppress
from pathlib import Path

ELSEWHERE = "Name another folder with `store=` or AUTOBATCH_CACHE_DIR."

# The end of a journal that names a further file, https://sqlite.org/fileformat2.html
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


class Fault(Exception):
    """Why a store is not used, and what the user can do about it.

    Attributes:
        what: the cause, which completes "it ...".
        remedy: what to do, as a sentence.
        detail: what was found; "" if `what` says it all.
    """

    def __init__(self, what: str, remedy: str, detail: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy, self.detail = what, remedy, detail

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.what}{detail}. {self.remedy}"


def foreign(detail: str) -> Fault:
    """Returns the fault of a database that something else wrote."""
    return Fault("holds a database that is not autobatch's", ELSEWHERE, detail)


def make_folder(folder: Path) -> None:
    """Makes `folder` and the parents it lacks, for this user alone.

    Raises:
        OSError: one cannot be made.
    """
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def vet_folder(folder: Path) -> None:
    """Checks that nobody else can have put anything into `folder`.

    Raises:
        Fault: somebody else can.
        OSError: it cannot be looked at.
    """
    facts = folder.stat()
    if not stat.S_ISDIR(facts.st_mode):
        raise Fault("is not a folder", ELSEWHERE)
    if facts.st_uid != os.geteuid():
        raise Fault("belongs to another user", ELSEWHERE)
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        remedy = f"Run `chmod go-w {shlex.quote(str(folder))}` if you trust what is in it."
        raise Fault("can be written by other users", remedy)


def vet_files(database: Path) -> None:
    """Checks that SQLite will touch no file outside the folder of `database`.

    Raises:
        Fault: a file of the database leads out of the folder.
        OSError: one cannot be looked at.
    """
    for ending in ("", "-journal", "-wal", "-shm"):
        path = database.with_name(database.name + ending)
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise foreign(f"{path.name} is not a plain file")
    # Rolling back, SQLite deletes the file that the end of the journal names. Ours name none.
    with suppress(FileNotFoundError), Path(f"{database}-journal").open("rb") as journal:
        journal.seek(max(0, journal.seek(0, os.SEEK_END) - len(_JOURNAL_MAGIC)))
        if journal.read() == _JOURNAL_MAGIC:
            raise foreign("its journal names another file")
