"""Locates the telemetry file of each node, and detects shared file systems.

Every node of a run has its own run directory (for nodes other than 0: `node-<n>` below the job's) with its own file.
So no two hosts ever write the same file, even in a shared directory.

SQLite's write-ahead log needs memory shared by all readers, which processes on two hosts do not have: on a network
file system the file is written with a rollback journal instead, whose locks such a file system supports
(https://sqlite.org/wal.html, "all processes must be on the same host computer").
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

TELEMETRY_FILE: Final = "telemetry.sqlite"

_SHARED: Final = frozenset(
    (
        *(
            "nfs",
            "nfs4",
            "cifs",
            "smb3",
            "smbfs",
            "9p",
            "afs",
            "ceph",
            "lustre",
            "beegfs",
            "gpfs",
            "glusterfs",
            "wekafs",
        ),
        *("pvfs2", "ocfs2", "gfs2", "virtiofs", "panfs", "daos", "vast", "quobyte", "orangefs", "coda", "juicefs"),
    )
)


def files_of(run_dir: Path) -> list[tuple[int, Path]]:
    """Return node and file of every node that has a file, or may have one that is not accessible; node 0 first."""
    found = ((node, directory / TELEMETRY_FILE) for node, directory in nodes_of(run_dir))
    return [(node, path) for node, path in found if may_be_there(path)]


def nodes_of(run_dir: Path) -> list[tuple[int, Path]]:
    """Return number and directory of each node: the first one's has those of the others."""
    try:
        names = os.listdir(run_dir)
    except OSError:
        names = []
    others = sorted((int(name[5:]), run_dir / name) for name in names if re.fullmatch(r"node-[0-9]{1,6}", name))
    return [(0, run_dir), *others]


def may_be_there(path: Path) -> bool:
    """Whether the file exists or may exist: `Path.exists` raises in a directory without access permission."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def is_shared(path: Path, *, mountinfo: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether other hosts may see this file; False where that is not known.

    FUSE reports only `fuse`, or `fuse` and a name (`fuse.sshfs`): this is treated as shared.
    """
    try:
        device = os.stat(path).st_dev
        text = mountinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in text.splitlines():
        # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw; see proc(5)
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        if len(fields) > 2 and fields[2] == wanted:
            kind = source.split(" ")[0]
            return kind in _SHARED or kind.startswith("fuse.")
    return False
