"""Prometheus exposition: one metric catalogue, the values of a state, a cached render."""

from __future__ import annotations
