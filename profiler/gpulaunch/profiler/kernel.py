"""Identifies the scope of a pid: a boot of a machine, and a pid namespace of it.

The host name does not identify it: the containers of a pod share one, and a rebooted machine keeps its own.
"""

from __future__ import annotations

import os
from typing import Final

_BOOT: Final = "/proc/sys/kernel/random/boot_id"


def kernel() -> str:
    """Return this process's identifier of both; "" where it is not known."""
    try:
        with open(_BOOT, encoding="ascii") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # a hardened container: then no pid is judged
        return ""
