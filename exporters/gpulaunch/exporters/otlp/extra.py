"""Checks for OTLP before anything of it is imported: whether it is installed, and its endpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

CLOSE_S: Final = 3.0
"""How long the last message may delay the end of a job."""

_NEEDS: Final = ("opentelemetry.sdk.metrics.export", "opentelemetry.exporter.otlp.proto.http.metric_exporter")
_PATH: Final = "/v1/metrics"


def missing(path: Sequence[str] | None = None) -> str | None:
    """Return that OpenTelemetry is not installed, as one line; None: it is. Called before a job starts.

    Looks for its files and imports nothing: the calling launcher does not use it otherwise. (`opentelemetry` is a
    namespace of many packages: importlib would import the parents to find the submodules.)

    Args:
        path: where to look; default: sys.path.
    """
    for name in _NEEDS:
        place = name.replace(".", "/")
        looked_at = [Path(folder, f"{place}{end}") for folder in path or sys.path for end in ("/__init__.py", ".py")]
        if not any(file.is_file() for file in looked_at):
            return f"{name.rpartition('.')[0]} is not installed; pip install 'gpulaunch[otlp]'"
    return None


def complaint_about(url: str) -> str | None:
    """Return what is wrong with a collector's address, as one line, or None."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a number
    except ValueError as error:
        return f"not an address: {error}; give one such as http://collector:4318"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "not an address; give one such as http://collector:4318"
    if parts.username is not None or parts.password is not None:
        return "a password in an address is seen by every user of this machine (ps); use OTEL_EXPORTER_OTLP_HEADERS"
    return None


def endpoint(url: str) -> str:
    """Return the metrics URL of a collector: with the standard path, unless the address has one."""
    parts = urlsplit(url)
    return url if parts.path.strip("/") else parts._replace(path=_PATH).geturl()
