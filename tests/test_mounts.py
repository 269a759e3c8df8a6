"""On which file system a folder lies, and where its store then is."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from records import KEY, make_record

from autobatch import AutobatchWarning, _mounts, _store
from autobatch._mounts import host_name, mounted_as, network_type
from autobatch._store import Store, open_store

MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 27 0:40 / /home rw,relatime shared:2 master:7 - nfs4 server:/home rw
31 27 0:41 / /mnt/with\040space rw - cifs //server/share rw
32 30 0:42 / /home/local rw - xfs /dev/vdb rw
33 27 0:43 / /twice rw - nfs server:/hidden rw
34 27 0:44 / /twice rw - tmpfs tmpfs rw
damaged
35 27 - fuse.sshfs
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "ext4"),
        ("/var/cache", "ext4"),
        ("/home/me/.cache", "nfs4"),
        ("/home", "nfs4"),
        ("/homework", "ext4"),
        ("/home/local/me", "xfs"),
        ("/mnt/with space/store", "cifs"),
        ("/mnt/with", "ext4"),
        ("/twice/store", "tmpfs"),
    ],
)
def test_the_nearest_mount_counts(folder: str, kind: str) -> None:
    assert mounted_as(Path(folder), MOUNTS) == kind


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert mounted_as(Path("/home"), "") is None


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "lustre", "fuse.sshfs", "ceph"])
def test_types_of_the_network(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mounts, "mounted_as", lambda *_: kind)
    assert network_type(Path("/home")) in (kind, None)  # None without /proc
    monkeypatch.setattr(_mounts, "mounted_as", lambda *_: "ext4")
    assert network_type(Path("/home")) is None


@pytest.mark.parametrize(
    ("name", "folder"),
    [("node-7.cluster", "node-7.cluster"), ("a/b", "a_b"), ("..", "unknown"), ("", "unknown")],
)
def test_host_names_a_folder(name: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mounts.os, "uname", lambda: os.uname_result(("", name, "", "", "")))
    assert host_name() == folder


def test_on_the_network_every_host_has_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_store, "network_type", lambda _: "nfs4")
    monkeypatch.setattr(_store, "host_name", lambda: "node7")
    with pytest.warns(AutobatchWarning, match="network file system .nfs4.*cache export") as caught:
        store = open_store(tmp_path / "records")
    assert len(caught) == 1
    assert store is not None
    assert store.path == tmp_path / "records" / "node7"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_store(tmp_path / "records") is store
        inside = open_store(store.path)  # as `autobatch cache path` prints it
    assert inside is not None
    assert inside.path == store.path
    store.put(make_record())
    assert Store(store.path).get(KEY) == make_record()
