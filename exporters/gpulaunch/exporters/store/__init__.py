"""telemetry.sqlite of a run directory: the whole run, finely what is new, coarsely what is old."""

from __future__ import annotations
