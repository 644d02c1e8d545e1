"""Decides whether a rank hangs, and where: learnt allowances, then stacks, then one verdict."""

from __future__ import annotations
