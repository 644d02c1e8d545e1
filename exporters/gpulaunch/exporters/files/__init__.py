"""Files that a run writes or exports for people and their tools."""

from __future__ import annotations
