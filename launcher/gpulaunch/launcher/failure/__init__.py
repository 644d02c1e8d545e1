"""Analyses a failed attempt: what each rank reported, which one failed first, and the report for the user."""

from __future__ import annotations
