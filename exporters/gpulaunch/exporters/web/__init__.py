"""The run as a web page, served at the address of the metrics."""

from __future__ import annotations
