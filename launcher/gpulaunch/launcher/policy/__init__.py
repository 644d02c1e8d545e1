"""What a run does about a failure, and what its time went into: decisions without a clock and without files."""

from __future__ import annotations
