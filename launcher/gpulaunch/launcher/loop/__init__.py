"""Where waiting happens, and how processes are started."""

from __future__ import annotations
