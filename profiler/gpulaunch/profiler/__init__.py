"""What is measured, and what it means; imports nothing of the launcher or the exporters."""

from __future__ import annotations
