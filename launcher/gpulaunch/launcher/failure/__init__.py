"""What a failed rank said, which one failed first, and how to say so."""

from __future__ import annotations
