"""One file per source, one verb: read."""

from __future__ import annotations
