"""Parses the head of an HTTP request strictly, or rejects it with a status."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) ([!-~]+) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):(.*)")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The parts of a request head that are used here."""

    method: str
    path: str
    host: str | None
    accept: str
    minor: int
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """All headers, keyed by lower-case name."""


class RequestError(Exception):
    """The request is answered with an error status."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


def parse_head(head: bytes) -> Request:
    """Read the lines before the first empty one.

    Raises:
        RequestError: they are not the head of an HTTP/1 request.
    """
    request_line, *lines = head.replace(b"\r\n", b"\n").split(b"\n")
    match = _REQUEST_LINE.fullmatch(request_line)
    if match is None:
        raise RequestError(HTTPStatus.BAD_REQUEST)
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise RequestError(HTTPStatus.BAD_REQUEST)
        name, value = header[1].decode("ascii").lower(), header[2].strip(b" \t").decode("latin-1")
        if name == "host" and name in headers:
            raise RequestError(HTTPStatus.BAD_REQUEST)
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    minor = int(match[3])
    if minor and "host" not in headers:
        raise RequestError(HTTPStatus.BAD_REQUEST)
    return Request(
        method=match[1].decode("ascii"),
        path=match[2].decode("ascii").partition("?")[0],
        host=headers.get("host"),
        accept=headers.get("accept", ""),
        minor=minor,
        headers=headers,
    )
