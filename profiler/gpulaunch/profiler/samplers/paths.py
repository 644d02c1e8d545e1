"""How the file of a line is told: one spelling in all findings, whoever has seen the line.

A rank spells the paths that it tells itself (`probe.sites.path_of`). Stacks are taken from outside and have paths as
Python has them: those are spelled here, to the same.
"""

from __future__ import annotations

import os
from typing import Final

_PACKAGES: Final = ("/site-packages/", "/dist-packages/")


def shown_path(file: str, directory: str) -> str:
    """Give a path relative to a program's working directory, or to where packages are installed."""
    for packages in () if file.startswith("<") else _PACKAGES:
        _, found, rest = file.rpartition(packages)
        if found and rest:
            return rest
    return file.removeprefix(directory + os.sep) if directory else file


def working_directory(pid: int, *, root: str = "/") -> str:
    """Give the working directory of a process; empty if it may not be asked, is gone, or has none any more."""
    try:
        directory = os.readlink(os.path.join(root, f"proc/{pid}/cwd"))
    except OSError:
        return ""
    return "" if directory.endswith(" (deleted)") else directory
