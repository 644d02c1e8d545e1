"""Who is answered: requests by a name of this endpoint, of a page that came from it, with its token if it has one."""

from __future__ import annotations

import hmac
import ipaddress
import re


class RequestGuard:
    """Decides whether a Host header names this endpoint."""

    def __init__(self, bound: str, hostname: str) -> None:
        """Know the names of an endpoint bound to an address (as `getsockname` gives it) on a machine of that name."""
        address = ipaddress.ip_address(bound.partition("%")[0])
        self._any = address.is_unspecified  # bound to all addresses: reached by names we cannot know, and no secret
        self._names = {"localhost"}
        if not address.is_loopback:
            self._names |= {hostname.lower(), hostname.partition(".")[0].lower()} - {""}
        self._address = address

    def admits(self, host: str | None, *, strange_names: bool = True) -> bool:
        """Say whether a request with this Host header may be answered (browsers always send one).

        `strange_names`: at an endpoint that is bound to all addresses, names that we cannot know are answered. An
        address is no such name: nobody can point it elsewhere.
        """
        if host is None or (self._any and strange_names):
            return True
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::\d{1,5})?", host)
        if match is None:
            return False
        name = (match[1] or match[2]).lower().removesuffix(".")
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return self._any or address.is_loopback or address == self._address


def same_origin(origin: str | None, host: str | None) -> bool:
    """Say whether an Origin header (None: there is none) is of a page that came from the host that is asked."""
    return origin is None or (host is not None and re.sub(r"^https?://", "", origin).lower() == host.lower())


def holds_token(authorization: str, token: str) -> bool:
    """Say whether an Authorization header has the token; how long that takes tells nothing of it."""
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(given.strip().encode(), token.encode())
    return same and scheme.lower() == "bearer"
