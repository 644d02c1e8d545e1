"""The view of a run that the terminal, the web page and the report share."""

from __future__ import annotations
