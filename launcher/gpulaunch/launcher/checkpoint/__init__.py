"""Which checkpoint a job resumes from: found, verified and named by reading files only, never by loading them."""

from __future__ import annotations
