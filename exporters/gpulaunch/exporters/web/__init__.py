"""The run as a page for a browser, at the address of the metrics."""

from __future__ import annotations
