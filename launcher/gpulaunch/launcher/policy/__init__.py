"""Restart policy and goodput accounting: decisions without a clock and without files."""

from __future__ import annotations
