"""The catalogue over OpenTelemetry's protocol, for who collects by that. Needs the extra `gpulaunch[otlp]`."""

from __future__ import annotations
