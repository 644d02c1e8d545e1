"""A run seen from outside: which run is meant, its processes, and its event log."""

from __future__ import annotations
