"""Measures training jobs and analyses the results; imports nothing of the launcher or the exporters."""

from __future__ import annotations
