"""Which checkpoint a job goes on from: found, verified and named by reading files only, never by loading them."""

from __future__ import annotations
