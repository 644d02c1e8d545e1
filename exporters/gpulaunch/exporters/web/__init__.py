"""What the sidecar serves over HTTP: the run as a web page and as JSON, the metrics, its health."""

from __future__ import annotations
