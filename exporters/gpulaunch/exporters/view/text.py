"""Makes untrusted text safe for a terminal."""

from __future__ import annotations

import re
from typing import Final

# C0 and C1 (ESC and CSI among them), the soft hyphen, marks and isolates of direction, zero-width characters and
# joiners, separators of lines and paragraphs, invisible operators, interlinear marks, tags, half of a surrogate pair.
_OBEYED: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def inert(text: str) -> str:
    r"""Escape what a terminal would interpret or hide as `\x1b`: no text moves the cursor or imitates another.

    Newlines and tabs too: the result is one line.
    """
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
