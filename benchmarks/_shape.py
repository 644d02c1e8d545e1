"""The size of things in the jobs of overhead.py and growth.py; what reads their results needs no torch for it."""

from __future__ import annotations

__all__ = ["BATCH", "EPOCH_STEPS", "METERS", "SAMPLES"]

SAMPLES = 1 << 14
BATCH = 16
EPOCH_STEPS = SAMPLES // BATCH
METERS = ("blocks", "heap_bytes", "rss_bytes")
