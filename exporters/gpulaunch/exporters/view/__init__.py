"""The one view of a run, which the terminal, the page and the report show."""

from __future__ import annotations
