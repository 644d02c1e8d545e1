"""Faces of other launchers over gpulaunch's engine."""

from __future__ import annotations
