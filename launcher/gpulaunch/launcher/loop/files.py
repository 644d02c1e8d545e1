"""Writes files atomically, and shows their names to users."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from gpulaunch.profiler.files import replacing


def write_json(path: str, content: Any) -> None:
    """Write a value as JSON, atomically, readable by its owner only. Raises OSError."""
    write_text(path, json.dumps(content, indent=1, default=_plain) + "\n")


def write_text(path: str, text: str) -> None:
    """Write a text atomically, readable by its owner only; safe with several writers. Raises OSError."""
    with replacing(path, suffix=f".{os.getpid()}") as file:
        file.write(text.encode())


def shown(path: str) -> str:
    """A path or URL as a user would type it here; file names may contain any character."""
    if "://" not in path:
        with contextlib.suppress(OSError):  # the current directory may be gone
            relative = os.path.relpath(path)
            path = path if relative.startswith("..") else os.path.join(".", relative)
    return "".join(c if c.isprintable() else "?" for c in path)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
