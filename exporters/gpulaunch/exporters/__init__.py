"""How measurements leave the house."""

from __future__ import annotations
