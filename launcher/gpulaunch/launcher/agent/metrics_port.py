"""The address of the metrics: the agent binds the socket and holds it, so the address outlives any one sidecar."""

from __future__ import annotations

import socket

from gpulaunch.launcher.job.spec import METRICS_PORT_BASE

_PORTS_TRIED = 200


def bind_metrics(host: str, port: int | None) -> socket.socket:
    """Bind and listen: `port`, or the first free one from METRICS_PORT_BASE upwards (None). Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    candidates = [port] if port is not None else [*range(METRICS_PORT_BASE, METRICS_PORT_BASE + _PORTS_TRIED), 0]
    for candidate in candidates:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A past run's connections in TIME_WAIT do not matter. If two launchers bind a port at once, Linux lets one
            # of them listen (inet_csk_listen_start checks for conflicts again), and the other tries the next port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, candidate))
            sock.listen(socket.SOMAXCONN)
        except OSError:
            sock.close()
            if candidate == candidates[-1]:
                raise
            continue
        return sock
    raise AssertionError("the last candidate either binds or raises")


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    """URL of the metrics, as a user would type it."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 (shown, not bound)
        host = socket.gethostname()
    return f"{scheme}://[{host}]:{port}/metrics" if ":" in host else f"{scheme}://{host}:{port}/metrics"


def other_port_notice(sock: socket.socket, port: int | None) -> str:
    """Line for the console if the first port was in use, else "" (`port`: as for `bind_metrics`)."""
    used = sock.getsockname()[1]
    if port is not None or used == METRICS_PORT_BASE:
        return ""
    return f"port {METRICS_PORT_BASE} is taken: metrics are served on {used}"
