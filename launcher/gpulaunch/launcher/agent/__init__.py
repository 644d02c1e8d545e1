"""The state table, and the agent that carries out what it decides."""

from __future__ import annotations
