"""The event loop, and how processes are started."""

from __future__ import annotations
