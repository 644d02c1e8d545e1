"""Request authorization: checks the Host header, the Origin header and the bearer token."""

from __future__ import annotations

import hmac
import ipaddress
import re


class RequestGuard:
    """Decides whether a Host header names this endpoint."""

    def __init__(self, bound: str, hostname: str) -> None:
        """Take the address the endpoint is bound to (as from `getsockname`) and the host name of the machine."""
        address = ipaddress.ip_address(bound.partition("%")[0])
        self._any = address.is_unspecified  # bound to all addresses: its names cannot be known, and it is not secret
        self._names = {"localhost"}
        if not address.is_loopback:
            self._names |= {hostname.lower(), hostname.partition(".")[0].lower()} - {""}
        self._address = address

    def admits(self, host: str | None, *, strange_names: bool = True) -> bool:
        """Say whether a request with this Host header may be answered (browsers always send one).

        `strange_names`: an endpoint bound to all addresses also accepts unknown host names. It accepts IP addresses in
        any case: DNS cannot point them elsewhere.
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
    """Say whether an Origin header (None: no such header) names the host that the request is sent to."""
    return origin is None or (host is not None and re.sub(r"^https?://", "", origin).lower() == host.lower())


def holds_token(authorization: str, token: str) -> bool:
    """Say whether an Authorization header has the token, compared in constant time."""
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(given.strip().encode(), token.encode())
    return same and scheme.lower() == "bearer"
