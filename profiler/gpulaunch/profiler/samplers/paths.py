"""Normalises file paths, so that a line has one spelling in all findings, whatever its source.

A rank normalises the paths that it reports (`probe.sites.path_of`). Stacks sampled from outside have paths as in
Python: this module converts them to the same form.
"""

from __future__ import annotations

import os
from typing import Final

PYTHON_DIR: Final = r".*/lib(?:64)?/python3\.\d+t?/"
"""Pattern of where Python's own library is; so are the next two."""
PACKAGES_DIR: Final = r".*/(?:site|dist)-packages/"
OWN_DIRS: Final = r".*/gpulaunch/(?:launcher|profiler|compat|checkpoint)/"
"""Of our own code that may be on a rank's stack (as in `probe.sites.caller`)."""
_PACKAGES: Final = ("/site-packages/", "/dist-packages/")


def shown_path(file: str, directory: str) -> str:
    """Return a path relative to a program's working directory, or to where packages are installed."""
    for packages in () if file.startswith("<") else _PACKAGES:
        _, found, rest = file.rpartition(packages)
        if found and rest:
            return rest
    return file.removeprefix(directory + os.sep) if directory else file


def working_directory(pid: int, *, root: str = "/") -> str:
    """Return the working directory of a process; empty if it may not be read, or process or directory are gone."""
    try:
        directory = os.readlink(os.path.join(root, f"proc/{pid}/cwd"))
    except OSError:
        return ""
    return "" if directory.endswith(" (deleted)") else directory
