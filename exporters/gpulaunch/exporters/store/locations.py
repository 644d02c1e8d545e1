"""Where the file of a node is, and what kind of file system that is.

Every node of a run has a run directory of its own (a node whose number is not 0: `node-<n>` below the job's), and a
file of its own in it. So no two hosts ever write one file, on a shared directory either.

SQLite's write-ahead log needs memory that all readers share, which processes of two hosts do not have: where the
directory is on a network file system, the file is written with a rollback journal instead, whose locks such a file
system has (https://sqlite.org/wal.html, "all processes must be on the same host computer").
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
    """Give node and file of every node of a run that has one, or may have one that we may not see; node 0 first."""
    found = [(0, run_dir / TELEMETRY_FILE)]
    try:
        names = os.listdir(run_dir)
    except OSError:
        names = []
    found += sorted(
        (int(name[5:]), run_dir / name / TELEMETRY_FILE) for name in names if re.fullmatch(r"node-[0-9]{1,6}", name)
    )
    return [(node, path) for node, path in found if may_be_there(path)]


def may_be_there(path: Path) -> bool:
    """Whether there is such a file, as far as we may look: `Path.exists` raises where a directory is closed to us."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def is_shared(path: Path, *, mountinfo: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether other hosts may see this file; where that is not known, they may not.

    FUSE tells no more than that it is FUSE, or FUSE and a name (`fuse.sshfs`): that is taken for shared.
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
