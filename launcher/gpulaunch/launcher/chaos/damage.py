"""Damages a checkpoint as crashes and disks do: truncates a file, flips one bit, or removes a file."""

from __future__ import annotations

import os
import random

from gpulaunch.launcher.runs.processes import RunError

_ABOUT = frozenset({"gpulaunch-manifest.json"})
"""Files that only describe the others."""


def damage(path: str, how: str, rng: random.Random) -> str:
    """Damage the checkpoint at `path` (a file, or a directory of files); return one phrase about it.

    Raises:
        RunError: there is nothing to damage, or it is not writable.
    """
    try:
        victim = _victim(path, rng)
        name = os.path.basename(victim)
        size = os.path.getsize(victim)
        if how == "remove":
            os.unlink(victim)
            return f"removed {name} ({size} bytes)"
        if how == "truncate":
            os.truncate(victim, size // 2)
            return f"cut {name} from {size} to {size // 2} bytes"
        at, bit = rng.randrange(size), rng.randrange(8)
        with open(victim, "r+b", buffering=0) as file:
            file.seek(at)
            (value,) = file.read(1)
            file.seek(at)
            file.write(bytes([value ^ 1 << bit]))
    except OSError as err:
        raise RunError(f"cannot damage {path}: {err.strerror}") from None
    return f"flipped bit {bit} of byte {at} of {name} ({size} bytes)"


def _victim(path: str, rng: random.Random) -> str:
    """The file to damage: one with data, larger ones more likely, as on a real disk."""
    if os.path.isfile(path):
        return path
    files = sorted(
        os.path.join(directory, name)
        for directory, _, names in os.walk(path)
        for name in names
        if name not in _ABOUT and os.path.getsize(os.path.join(directory, name))
    )
    if not files:
        raise RunError(f"{path} contains no file to damage")
    return rng.choices(files, [os.path.getsize(file) for file in files])[0]
