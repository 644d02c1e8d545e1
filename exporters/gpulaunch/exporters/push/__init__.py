"""Pushes a job's last values once to a Pushgateway, for queries after it has ended."""

from __future__ import annotations
