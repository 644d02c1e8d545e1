"""telemetry.sqlite of a run directory: the history of the whole run, recent data finely, older data downsampled."""

from __future__ import annotations
