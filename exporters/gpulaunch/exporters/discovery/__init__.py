"""Prometheus service discovery: one file_sd file per node of a run, for as long as its endpoint exists."""

from __future__ import annotations
