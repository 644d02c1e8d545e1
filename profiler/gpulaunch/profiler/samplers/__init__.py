"""Samplers: one module per source of measurements, each with one method: read."""

from __future__ import annotations
