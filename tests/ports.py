"""A port for what must be told one before it can ask for any."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_port", "has_ipv6"]


def free_port() -> int:
    """None of those that others are given who ask for any: it would be taken by the time that it is used."""
    for _ in range(100):
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port from 20000 to 30000 is free")


def has_ipv6() -> bool:
    """Whether this kernel has an IPv6 loopback."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
