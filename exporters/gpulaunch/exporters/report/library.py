"""Loads plotly.js from the package plotly, for charts that can be zoomed: the extra `gpulaunch[report]`."""

from __future__ import annotations

from importlib import import_module


def plotly_js() -> str | None:
    """Return the source of plotly.js; None if the package is not installed or does not work."""
    try:
        source = import_module("plotly.offline").get_plotlyjs()
    except (ImportError, AttributeError, OSError):
        return None
    # It is inserted into a <script> verbatim: nothing in it, in any later version, may close that element.
    if not isinstance(source, str) or "</script" in source.lower() or "<!--" in source or "\0" in source:
        return None
    return source
