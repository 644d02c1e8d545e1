"""Validates a Pushgateway's address before a job starts. A separate module, so that the launcher need not load the code
that pushes.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

LONGEST_S: Final = 3.0
"""How long a push may delay the end of a job, whatever the gateway does."""


def complaint_about(url: str) -> str | None:
    """Return what is wrong with a gateway's address, as one line, or None. Called before a job starts."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a number
    except ValueError as error:
        return f"not an address: {error}; give one such as http://gateway:9091"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "not an address; give one such as http://gateway:9091"
    if parts.username is not None or parts.password is not None:
        return "a password in an address is seen by every user of this machine (ps); let a proxy on this node add it"
    if parts.query or parts.fragment:
        return "an address with ? or # in it is none of a Pushgateway; give one such as http://gateway:9091"
    return None
