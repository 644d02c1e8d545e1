"""The command line: one file per verb; the only place where rooms are put together."""

from __future__ import annotations
