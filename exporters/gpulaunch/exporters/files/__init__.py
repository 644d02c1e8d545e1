"""What a run leaves in its directory for people and their tools."""

from __future__ import annotations
