"""How the nodes of one job agree on an attempt."""

from __future__ import annotations
