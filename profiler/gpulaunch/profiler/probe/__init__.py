"""The probe inside the user's process: standard library only, never raises, never blocks."""

from __future__ import annotations
