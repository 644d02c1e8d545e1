"""Bytes between a rank and the sidecar: standard library only."""

from __future__ import annotations
