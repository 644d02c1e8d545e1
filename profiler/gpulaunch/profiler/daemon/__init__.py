"""The sidecar: reads the samplers in turn and keeps the newest state. Also the daemon's side of torch traces."""

from __future__ import annotations
