"""Runs and restarts jobs: the agent, its loop, and their policies."""

from __future__ import annotations
