"""The Prometheus endpoint: one catalogue, a cached render, one small server."""

from __future__ import annotations
