"""The part of NVIDIA's Xid catalogue that is relevant to training: each number is written once, here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

PROGRAM_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""Errors caused by programs, after which the card is healthy: those that NVIDIA's k8s-device-plugin excludes from its
health checks (internal/rm/health.go, "Application errors: the GPU should still be healthy"). The alert GpulaunchXid in
deploy/prometheus leaves out the same ones."""

XID_TEXTS: Final[Mapping[int, str]] = MappingProxyType(
    {
        48: "double-bit ECC error",
        63: "row remapping recorded",
        64: "row remapping failed",
        74: "NVLink error",
        79: "the GPU has fallen off the bus",
        94: "contained ECC error",
        95: "uncontained ECC error",
        119: "GSP timeout",
        120: "GSP error",
        140: "ECC unrecovered error",
    }
)
"""The catalogue's texts for the most frequent faults of cards."""

XIDS: Final = PROGRAM_XIDS | {
    *XID_TEXTS,
    *(32, 46, 69),  # an engine stopped on its input: mostly a program's fault
    92,  # memory: many single-bit ECC errors
    *(121, 137, *range(144, 151)),  # NVLink, the link to the CPU
    *(61, 62, 143, 154),  # firmware, initialisation, and the driver's request to reset the card
}
"""All numbers that are relevant to training. Metrics combine all others into one: a label whose values a driver may
choose would have unbounded series."""
