"""Exporters: Prometheus, OTLP, files, reports, the web page and the terminal UI."""

from __future__ import annotations
