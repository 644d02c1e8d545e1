"""Makes text from a rank safe for a terminal. `profiler.redact` hides secrets. The raw log files stay raw."""

from __future__ import annotations

import re

_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"


def inert(text: str) -> str:
    r"""Show control characters as `\x1b`, so that no rank's text moves the cursor, recolours or renames the terminal.

    Tabs and newlines stay. Direction marks and lone surrogates are removed: they reorder a line, or cannot be printed.
    """
    return re.sub(_CONTROL, lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
