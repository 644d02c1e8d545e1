"""The HTTP server of the sidecar: a few short GET requests at a time, with limits, TLS and authorization.

It knows nothing of what it serves: `web` gives it the routes.
"""

from __future__ import annotations

from gpulaunch.exporters.http.auth import RequestGuard, holds_token, same_origin
from gpulaunch.exporters.http.negotiation import takes_gzip, weights
from gpulaunch.exporters.http.request import Request, RequestError, parse_head
from gpulaunch.exporters.http.response import Response
from gpulaunch.exporters.http.server import HttpServer, Page, Route
from gpulaunch.exporters.http.webconfig import WebConfig, WebConfigError, read_web_config

__all__ = [
    "HttpServer",
    "Page",
    "Request",
    "RequestError",
    "RequestGuard",
    "Response",
    "Route",
    "WebConfig",
    "WebConfigError",
    "holds_token",
    "parse_head",
    "read_web_config",
    "same_origin",
    "takes_gzip",
    "weights",
]
