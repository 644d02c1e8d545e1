"""The resolved job: options, job file, environment, and the source of each value."""

from __future__ import annotations
