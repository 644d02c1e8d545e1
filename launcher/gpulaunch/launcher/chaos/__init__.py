"""Faults on purpose: what can be done to a run from outside, to see it recover. Nothing of this is in the ranks."""

from __future__ import annotations
