"""Shared-memory files between a rank, the agent and the sidecar; uses the standard library only."""

from __future__ import annotations
