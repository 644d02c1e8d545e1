"""How Prometheus hears of a job: one file of file_sd for each node of a run, there while its page is."""

from __future__ import annotations
