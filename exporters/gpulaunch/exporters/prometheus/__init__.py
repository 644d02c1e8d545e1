"""The Prometheus endpoint: one metric catalogue, a cached render, a small HTTP server."""

from __future__ import annotations
