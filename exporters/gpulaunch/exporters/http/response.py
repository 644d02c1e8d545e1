"""A response, and its head as bytes: every response forbids caching, sniffing and being read by other origins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

_PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class Response:
    """What a client gets."""

    body: bytes
    content_type: str = _PLAIN
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Additional headers, or overrides of those that every response has."""


def error(status: HTTPStatus) -> Response:
    """Return the response that only names its status."""
    return Response(status=status, body=f"{status.value} {status.phrase}\n".encode())


def encode_head(response: Response) -> bytes:
    """Return the status line and the headers, up to the empty line."""
    headers = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "Connection": "close",
    }
    if response.status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = "GET, HEAD"
    elif response.status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = 'Bearer realm="gpulaunch"'
    elif response.status is HTTPStatus.NOT_MODIFIED:
        del headers["Content-Length"], headers["Content-Type"]  # of the copy that the client has already
    headers |= response.headers
    lines = [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"HTTP/1.1 {response.status.value} {response.status.phrase}", *lines, "", ""]).encode("ascii")
