"""A run seen from outside, as its user sees it: which one is meant, who its processes are, what was done to it."""

from __future__ import annotations
