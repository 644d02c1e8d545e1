"""Who runs, when, and again: the agent, its loop, and what it decides."""

from __future__ import annotations
