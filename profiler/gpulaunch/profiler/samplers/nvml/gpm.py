"""Samples the utilisation of a GPU's units with GPM, the performance counters that NVML reads from Hopper on.

A reading compares two samples of the counters, so the figures are averages between this reading and the previous one.
The samples must be more than 100 ms apart (NVML's documentation of GPM: the counters are updated that often). Below
that, byte rates are 0, which is indistinguishable from no traffic; so faster readings are skipped. If samples are far
apart, because NVML did not answer, nothing is reported for the time between.

GPM uses another part of the GPU than CUPTI and Nsight, so it does not conflict with them (NVIDIA/DCGM#62).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

# NVML_GPM_METRIC_*: by number, because old bindings lack the names, and the numbers have never changed.
RATIOS: Final = MappingProxyType(
    {
        "sm_active": 2,  # share of SMs with work; utilisation is 1 as soon as one kernel runs on one of them
        "sm_occupancy": 3,  # of all warps that the SMs could hold
        "tensor_active": 5,
        "dram_active": 10,  # of the memory bandwidth
        "fp64_active": 11,
        "fp32_active": 12,
        "fp16_active": 13,
    }
)
"""NVML gives percentages, we give ratios; the pipes are without tensor cores."""
_RATES: Final = MappingProxyType(
    {"pcie_transmit": 20, "pcie_receive": 21, "nvlink_receive": 60, "nvlink_transmit": 61},
)
"""MiB per second; receive: to the GPU."""
_IDS: Final = (*RATIOS.items(), *_RATES.items())
_SHORTEST_S: Final = 0.2
_LONGEST_S: Final = 10.0
_MIB: Final = 1 << 20


class Gpm:
    """The counters of one GPU or of one MIG GPU instance."""

    def __init__(self, nvml: Any, sample: Callable[[Any], object], *, clock: Callable[[], float]) -> None:
        """`sample`: makes NVML store a sample of this GPU's counters in a buffer."""
        self._nvml = nvml
        self._sample = sample
        self._clock = clock
        self._request: Any = None
        self._before: Any = None
        self._after: Any = None
        self._before_s = 0.0
        self._ratios: dict[str, float] = {}
        self._moved: dict[str, float] = {}

    def open(self) -> None:
        """Take the first sample. An NVML error that is raised is the reason why there is no GPM."""
        nvml = self._nvml
        # With all metrics that the binding knows this is 19 KB (of version 13); the driver reads as many as are asked.
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(_IDS)
        for slot, (_, number) in enumerate(_IDS):
            self._request.metrics[slot].metricId = number
        self._before, self._after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._sample(self._before)
        self._before_s = self._clock()

    def close(self) -> None:
        """Free the buffers."""
        for buffer in (self._before, self._after):
            if buffer is not None:
                self._nvml.nvmlGpmSampleFree(buffer)
        self._before = self._after = None

    def read(self) -> None:
        """Compare with the previous sample, if that is old enough; NVML errors propagate and leave no ratios."""
        now = self._clock()
        if now - self._before_s < _SHORTEST_S:
            return
        self._ratios = {}
        self._sample(self._after)
        window_s, self._before_s = now - self._before_s, now
        self._before, self._after = self._after, self._before
        if window_s > _LONGEST_S:
            return
        self._request.sample1, self._request.sample2 = self._after, self._before  # the older one first
        self._nvml.nvmlGpmMetricsGet(self._request)
        for (name, _), metric in zip(_IDS, self._request.metrics, strict=False):
            value = float(metric.value)
            if metric.nvmlReturn or not math.isfinite(value) or value < 0:
                continue  # a metric that this GPU lacks
            if name in RATIOS:
                self._ratios[name] = min(value / 100, 1.0)
            else:
                self._moved[name] = self._moved.get(name, 0.0) + value * _MIB * window_s

    @property
    def ratios(self) -> Mapping[str, float]:
        """Utilisation of each unit, 0 to 1, between the last two samples; unknown units are left out."""
        return dict(self._ratios)

    def moved_bytes(self, name: str) -> int | None:
        """Return the bytes moved since `open`, summed from the rates (`pcie_receive`, `nvlink_transmit` ...)."""
        moved = self._moved.get(name)
        return None if moved is None else int(moved)
