"""Interfaces of other launchers on top of gpulaunch's engine."""

from __future__ import annotations
