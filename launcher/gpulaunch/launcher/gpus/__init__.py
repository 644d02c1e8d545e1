"""GPUs between two attempts: memory that must be freed, and cards that should not be used again."""

from __future__ import annotations
