"""Makes output safe for a terminal, and formats prefixes for it: pure.

A rank's output must not control the terminal: an escape sequence can set the title, move the cursor over other ranks'
lines or switch the character set. On a terminal only colours (SGR, ECMA-48 8.3.117) and tabs pass; any other control
character is written as text, as in a C string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

RESET = b"\x1b[0m"
# Carriage return, then EL (erase to the end of the line): erases an updating line.
ERASE = b"\r\x1b[K"
# DECAWM off and on: the terminal cuts an updating line at its right edge, so it stays one row high and can be erased.
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
# An updating line needs no more than a very wide screen shows.
_LIVE_BYTES = 1024

# Cyan, green, yellow, magenta, blue and three bright ones. No red: it looks like an error.
_PALETTE = (36, 32, 33, 35, 34, 96, 92, 95)
_BOLD = 1

_SGR = re.compile(rb"\x1b\[[0-9;:]*m")
# The ASCII controls except tab and newline, then C1 controls in UTF-8 (a terminal obeys those too).
_CONTROL = re.compile(rb"\x1b\[[0-9;:]*m|[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")


def wants_color(environ: Mapping[str, str], *, is_tty: bool) -> bool:
    """Colours are for a terminal that supports them, unless the user disabled them (https://no-color.org)."""
    return is_tty and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def inert(block: bytes) -> bytes:
    """A block of lines made harmless for a terminal; each line that leaves a colour on ends with a reset."""
    try:
        block.decode()
    except UnicodeDecodeError:
        block = block.decode("utf-8", "backslashreplace").encode()
    if _CONTROL.search(block) is None:
        return block
    block = _CONTROL.sub(_escaped, block)
    return b"\n".join(map(_closed, block.split(b"\n"))) if b"\x1b" in block else block


def _escaped(found: re.Match[bytes]) -> bytes:
    control = found[0]
    if control.startswith(b"\x1b["):
        return control
    return f"\\x{ord(control.decode()):02x}".encode()


def _closed(line: bytes) -> bytes:
    last = line.rfind(b"\x1b[")
    if last < 0:
        return line
    parameters = line[last + 2 : line.index(b"m", last)]
    return line + RESET if parameters.strip(b"0;") else line


def plain(line: bytes) -> str:
    """One line as text for reports: no colours, no control characters, every byte accounted for."""
    return inert(_SGR.sub(b"", line)).decode()


def ranks_label(ranks: Iterable[int]) -> str:
    """Ranks as ranges: `0-3,6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def default_prefix(ranks: Iterable[int]) -> bytes:
    """The default text before a line: `[3] `."""
    return f"[{ranks_label(ranks)}] ".encode()


def rank_colored(prefix: bytes, local_rank: int) -> bytes:
    """The prefix in the colour of its rank."""
    return b"\x1b[%dm%b%b" % (_PALETTE[local_rank % len(_PALETTE)], prefix, RESET)


def bold(prefix: bytes) -> bytes:
    """The prefix of lines that belong to no single rank."""
    return b"\x1b[%dm%b%b" % (_BOLD, prefix, RESET)


def live_line(prefix: bytes, state: bytes) -> bytes:
    """An updating line: drawn in place, cut by the terminal at its right edge, not ended."""
    return _NO_WRAP + prefix + inert(state[:_LIVE_BYTES]) + _WRAP
