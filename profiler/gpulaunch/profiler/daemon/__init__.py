"""The sidecar: reads the samplers in turn and keeps the newest state."""

from __future__ import annotations
