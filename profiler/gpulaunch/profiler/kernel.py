"""Where a pid means something: a boot of a machine, and a pid namespace of it.

The host's name does not say that: the containers of a pod share one, and what was booted anew has kept its own.
"""

from __future__ import annotations

import os
from typing import Final

_BOOT: Final = "/proc/sys/kernel/random/boot_id"


def kernel() -> str:
    """Name them for this process; "" where nobody says."""
    try:
        with open(_BOOT, encoding="ascii") as boot:
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # a hardened container: then nobody is judged
        return ""
