"""Sends the metrics of the catalogue over OTLP, the OpenTelemetry protocol. Needs the extra `gpulaunch[otlp]`."""

from __future__ import annotations
