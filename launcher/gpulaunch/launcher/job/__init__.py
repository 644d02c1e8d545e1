"""What is to be run: options, job file, environment, and where each value came from."""

from __future__ import annotations
