"""Where a folder lies: on a disk of this machine, or on a file system of the network."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NETWORK = {
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.ceph-fuse",
    "fuse.glusterfs",
    "fuse.sshfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "smb3",
    "smbfs",
}
_ESCAPE = re.compile(r"\\([0-7]{3})")


def network_type(folder: Path) -> str | None:
    """Returns the type of the network file system that a folder lies on, or would.

    None if it lies on none, or where nothing says so.

    Args:
        folder: an absolute path without links.
    """
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    found = mounted_as(folder, text)
    return found if found in _NETWORK else None


def mounted_as(folder: Path, mountinfo: str) -> str | None:
    """Returns the type of the file system that a folder lies on, or None.

    Args:
        folder: an absolute path without links.
        mountinfo: the mounts, as Linux lists them (proc_pid_mountinfo(5)); later ones hide
            earlier ones.

    >>> mounted_as(Path("/home/me"), "27 1 8:1 / / rw - ext4 /dev/sda1 rw")
    'ext4'
    """
    found, depth = None, -1
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        fields, kinds = mount.split(" "), source.split(" ")
        if len(fields) < 5 or not kinds[0]:
            continue
        point = Path(_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        if len(point.parts) >= depth and folder.is_relative_to(point):
            found, depth = kinds[0], len(point.parts)
    return found


def host_name() -> str:
    """Returns the name of this machine, as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", os.uname().nodename).strip(".") or "unknown"
