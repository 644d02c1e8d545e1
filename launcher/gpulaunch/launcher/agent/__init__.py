"""The state table and the agent that executes its actions."""

from __future__ import annotations
