"""plotly.js as the package plotly ships it, for charts that can be zoomed: the extra `gpulaunch[report]`."""

from __future__ import annotations

from importlib import import_module


def plotly_js() -> str | None:
    """Give the source of plotly.js; None where the package is not installed, or does not work."""
    try:
        source = import_module("plotly.offline").get_plotlyjs()
    except (ImportError, AttributeError, OSError):
        return None
    # It goes into a <script> as it is. Nothing in it may end that, whatever its next version brings.
    if not isinstance(source, str) or "</script" in source.lower() or "<!--" in source or "\0" in source:
        return None
    return source
