"""Reads one GPU with NVML: utilisation, clocks, power, temperature, throttling, links, memory errors, and GPM.

Most of it comes in two batches of fields, one of them read rarely. `nvmlDeviceGetPcieThroughput` is not used: it blocks
for 20 ms while it counts. Nothing is mapped by process either: in a container NVML's pids are the host's. Ranks and
this module identify a GPU by its UUID.

Fields are requested by number, because old bindings lack the names, and only those whose numbers have always meant the
same. Those of NVML_FI_DEV_CLOCKS_EVENT_REASON_{SW_THERM,HW_THERM,HW_POWER_BRAKE}_SLOWDOWN have not: they are 251 to
253 in driver 580.65 and 269 to 271 in the headers of CUDA 13, where the other side has power smoothing
(NVIDIA/k8s-test-infra#691). Read by the wrong number they would be a misleading 0. So those reasons are sampled
instead: one that holds at a reading counts for the time since the previous reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from gpulaunch.profiler.record import DIRECTIONS, THROTTLE_REASONS, GpuState
from gpulaunch.profiler.samplers.nvml import driver
from gpulaunch.profiler.samplers.nvml.counters import LinkTotal, Total, link_bytes_per_s
from gpulaunch.profiler.samplers.nvml.gpm import Gpm

TOTALS: Final = (
    *("energy_mj", "pcie_replays", "pcie_receive", "pcie_transmit", "nvlink_receive", "nvlink_transmit"),
    *THROTTLE_REASONS,  # in ns
)
"""The counters that start with the run; all integers."""


@dataclass(frozen=True, kw_only=True)
class CardReading:
    """One reading of one GPU."""

    state: GpuState
    """Without its totals."""
    totals: Mapping[str, int]
    """Since this sampler started: those of TOTALS that are known."""
    at_s: float


_Field = int | tuple[int, int]  # the number of a field, or number and scope
_ALL_LINKS: Final = 0xFFFFFFFF  # as the scope of an NVLink field: their sum
_OFTEN: Final[Mapping[str, _Field]] = MappingProxyType(
    {
        "power_cap": 74,  # NVML_FI_DEV_PERF_POLICY_...: ns
        "thermal": 75,
        "sync_boost": 76,
        "board_limit": 77,
        "reliability": 79,
        "nvlink_transmit": (138, _ALL_LINKS),  # KiB of payload
        "nvlink_receive": (139, _ALL_LINKS),
        "power_mw": 186,  # of this instant; the average, 185, takes 3 ms
        "pcie_transmit": 197,
        "pcie_receive": 198,
    }
)
_RARELY: Final[Mapping[str, _Field]] = MappingProxyType(
    {
        "ecc_corrected": 3,
        "ecc_uncorrected": 4,
        "energy_mj": 83,  # takes some ms
        "pcie_replays": 94,
        "rows_correctable": 142,
        "rows_uncorrectable": 143,
        "remap_pending": 144,
        "remap_failed": 145,
    }
)
_REASON_BITS: Final = MappingProxyType(  # nvmlClocksEventReason...
    {
        "power_cap": 0x04,
        "hw_slowdown": 0x08,
        "sync_boost": 0x10,
        "thermal": 0x20,
        "hw_thermal": 0x40,
        "hw_power_brake": 0x80,
    }
)
_LONGEST_SAMPLE_S: Final = 10.0
_LOST: Final = ("GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND", "DRIVER_NOT_LOADED")
_LOST_AGAIN_S: Final = 10.0  # a card that has fallen off the bus may take seconds to report it
# No card does more in a second: 10 kW, 4 TB over NVLink, two seconds of being throttled.
_MOST_MJ_PER_S: Final = 1e7
_MOST_NVLINK_PER_S: Final = 4e12
_MOST_NS_PER_S: Final = 2e9


class Card:
    """One GPU or MIG instance, and its values so far. Every call may hang."""

    def __init__(
        self, nvml: Any, handle: Any, *, index: int, clock: Callable[[], float], parent: Card | None = None
    ) -> None:
        """`parent`: the card, for a MIG instance."""
        self._nvml = nvml
        self.handle = handle
        self._index = index
        self._clock = clock
        self._parent = parent
        self.uuid = driver.text(nvml.nvmlDeviceGetUUID(handle))
        self._model = driver.text(nvml.nvmlDeviceGetName(handle))
        self._name = f"GPU {index}" if parent is None else f"GPU {index} {self.uuid}"
        self._gpm: Gpm | None = None
        self._cannot: set[str] = set()
        self._told: set[str] = set()
        self._errors: list[str] = []
        self._lost_until_s: float | None = None
        self._rare: dict[str, Any] = {}
        self._counted: dict[str, Total] = {}
        self._links: dict[str, LinkTotal] = {}
        self._totals: dict[str, int] = {}
        self._sampled_s: float | None = None

    def read(self, *, rarely: bool) -> tuple[CardReading, list[str]]:
        """Read everything that it supports; `rarely`: also slow-changing values, required in the first reading.

        Also returns the errors: what this card does not support at all in one line, once.
        """
        now = self._clock()
        self._errors = []
        facts: dict[str, Any] = {}
        if self._lost_until_s is not None and now < self._lost_until_s:
            self._errors.append(f"{self._name}: still lost")
        else:
            self._lost_until_s = None
            for what, ask in self._questions(rarely=rarely):
                if self._lost_until_s is None and what not in self._cannot:
                    self._try(what, ask, facts)
        if untold := sorted(self._cannot - self._told):
            self._errors.append(f"{self._name}: cannot say: {', '.join(untold)}")
            self._told |= self._cannot
        known = self._rare | facts if self._lost_until_s is None else {}
        parent_uuid = None if self._parent is None else self._parent.uuid
        state = GpuState(index=self._index, uuid=self.uuid, parent_uuid=parent_uuid, model=self._model, **known)
        return CardReading(state=state, totals=dict(self._totals), at_s=now), self._errors

    def close(self) -> None:
        """Free its NVML resources."""
        if self._gpm is not None:
            gpm, self._gpm = self._gpm, None
            gpm.close()

    def _questions(self, *, rarely: bool) -> Sequence[tuple[str, Callable[[], dict[str, Any]]]]:
        if self._parent is not None:
            return ("memory", self._ask_memory), ("GPM", self._ask_gpm)
        rare = ("link maximum", self._ask_link_maximum), ("rare fields", self._ask_rare_fields)
        return (
            *(rare if rarely else ()),
            ("utilization", self._ask_utilization),
            ("memory", self._ask_memory),
            ("clock", self._ask_clock),
            ("temperature", self._ask_temperature),
            ("PCIe link", self._ask_link),
            ("GPM", self._ask_gpm),  # before the fields: it replaces byte counters that cannot be followed
            ("fields", self._ask_fields),
            ("power", self._ask_power),
            ("throttle reasons", self._ask_reasons),
        )

    def _try(self, what: str, ask: Callable[[], dict[str, Any]], facts: dict[str, Any]) -> None:
        try:
            facts.update(ask())
        except Exception as error:  # bindings and drivers that do not match raise anything
            if driver.is_code(self._nvml, error, *_LOST):
                self._lost_until_s = self._clock() + _LOST_AGAIN_S
                self._errors.append(f"{self._name}: {error}")
            elif driver.is_final(self._nvml, error):
                self._cannot.add(what)
            else:
                self._errors.append(f"{self._name}: {what}: {error}")

    def _either(self, new: str, old: str, *args: Any) -> Any:
        """Call by the new name, or by the old one if binding, driver or card do not support the new one."""
        try:
            return getattr(self._nvml, new)(self.handle, *args)
        except Exception as error:
            if not driver.is_final(self._nvml, error):
                raise
        return getattr(self._nvml, old)(self.handle, *args)

    def _ask_utilization(self) -> dict[str, Any]:
        return {"utilization_ratio": self._nvml.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100}

    def _ask_memory(self) -> dict[str, Any]:
        info = self._nvml.nvmlDeviceGetMemoryInfo(self.handle)
        return {"memory_used_bytes": int(info.used), "memory_total_bytes": int(info.total)}

    def _ask_clock(self) -> dict[str, Any]:
        return {"sm_clock_hertz": self._nvml.nvmlDeviceGetClockInfo(self.handle, self._nvml.NVML_CLOCK_SM) * 1e6}

    def _ask_temperature(self) -> dict[str, Any]:
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        celsius = self._either("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", sensor)
        return {"temperature_celsius": float(celsius)}

    def _ask_link(self) -> dict[str, Any]:
        return {
            "pcie_generation": int(self._nvml.nvmlDeviceGetCurrPcieLinkGeneration(self.handle)),
            "pcie_width": int(self._nvml.nvmlDeviceGetCurrPcieLinkWidth(self.handle)),
        }

    def _ask_link_maximum(self) -> dict[str, Any]:
        self._rare["pcie_generation_max"] = int(self._nvml.nvmlDeviceGetMaxPcieLinkGeneration(self.handle))
        self._rare["pcie_width_max"] = int(self._nvml.nvmlDeviceGetMaxPcieLinkWidth(self.handle))
        return {}

    def _ask_power(self) -> dict[str, Any]:
        if not self._cannot & {"fields", "power_mw"}:
            return {}  # it came with the fields
        return {"power_watts": self._nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000}

    def _ask_gpm(self) -> dict[str, Any]:
        if self._gpm is None:
            self._gpm = self._open_gpm()
        else:
            self._gpm.read()
        return {"gpm_ratios": self._gpm.ratios}

    def _open_gpm(self) -> Gpm:
        nvml = self._nvml
        card = self.handle if self._parent is None else self._parent.handle
        if not nvml.nvmlGpmQueryDeviceSupport(card).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        if self._parent is None:
            gpm = Gpm(nvml, lambda buffer: nvml.nvmlGpmSampleGet(card, buffer), clock=self._clock)
        else:
            instance = nvml.nvmlDeviceGetGpuInstanceId(self.handle)
            gpm = Gpm(nvml, lambda buffer: nvml.nvmlGpmMigSampleGet(card, instance, buffer), clock=self._clock)
        try:
            gpm.open()
        except Exception:
            gpm.close()
            raise
        return gpm

    def _ask_rare_fields(self) -> dict[str, Any]:
        values = self._values(_RARELY)
        self._count("energy_mj", values, _MOST_MJ_PER_S)
        self._count("pcie_replays", values, math.inf)
        self._rare["ecc_errors"] = _pick(values, corrected="ecc_corrected", uncorrected="ecc_uncorrected")
        self._rare["remapped_rows"] = _pick(values, correctable="rows_correctable", uncorrectable="rows_uncorrectable")
        for name in ("remap_pending", "remap_failed"):
            self._rare[name] = bool(values[name]) if name in values else None
        return {}

    def _ask_fields(self) -> dict[str, Any]:
        values = self._values(_OFTEN)
        for reason in THROTTLE_REASONS:
            self._count(reason, values, _MOST_NS_PER_S)
        for direction in DIRECTIONS:
            self._count_nvlink(f"nvlink_{direction}", values)
            self._count_pcie(f"pcie_{direction}", values)
        return {"power_watts": values["power_mw"] / 1000} if "power_mw" in values else {}

    def _count(self, name: str, values: Mapping[str, int], most_per_s: float, *, unit: int = 1) -> None:
        if name in values:
            counter = self._counted.setdefault(name, Total(most_per_s))
            self._totals[name] = counter.add(values[name] * unit, self._clock())

    def _count_nvlink(self, name: str, values: Mapping[str, int]) -> None:
        self._count(name, values, _MOST_NVLINK_PER_S, unit=1024)
        if name in self._cannot and (moved := self._moved(name)):  # 0 more likely means a card without NVLink
            self._totals[name] = moved

    def _count_pcie(self, name: str, values: Mapping[str, int]) -> None:
        total = None
        if name in values:
            maximum = self._rare.get("pcie_generation_max"), self._rare.get("pcie_width_max")
            counter = self._links.setdefault(name, LinkTotal(link_bytes_per_s(*maximum)))
            total = counter.add(values[name], self._clock())
        elif name not in self._cannot:
            return  # it failed this time
        if total is None:
            total = self._moved(name)
        if total is None:
            self._totals.pop(name, None)
        else:
            self._totals[name] = total

    def _moved(self, name: str) -> int | None:
        return None if self._gpm is None or "GPM" in self._cannot else self._gpm.moved_bytes(name)

    def _ask_reasons(self) -> dict[str, Any]:
        bits = int(self._either("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"))
        now = self._clock()
        since_s = 0.0 if self._sampled_s is None else now - self._sampled_s
        self._sampled_s = now
        holds = tuple(reason for reason, bit in _REASON_BITS.items() if bits & bit)
        for reason in _REASON_BITS:
            if reason not in self._counted:
                grown_s = since_s if reason in holds and since_s <= _LONGEST_SAMPLE_S else 0.0
                self._totals[reason] = self._totals.get(reason, 0) + round(grown_s * 1e9)
        return {"throttled_by": holds}

    def _values(self, fields: Mapping[str, _Field]) -> dict[str, int]:
        """Request a batch of fields; return the available ones. Fields that this card lacks are not requested again."""
        wanted = [name for name in fields if name not in self._cannot]
        if not wanted:
            return {}
        answers = self._nvml.nvmlDeviceGetFieldValues(self.handle, [fields[name] for name in wanted])
        values: dict[str, int] = {}
        for name, answer in zip(wanted, answers, strict=True):
            if answer.nvmlReturn:
                self._refused(name, self._nvml.NVMLError(answer.nvmlReturn))
            elif (value := driver.number(answer)) is not None:
                values[name] = int(value)
        return values

    def _refused(self, name: str, error: Exception) -> None:
        if driver.is_code(self._nvml, error, *_LOST):
            raise error
        if driver.is_final(self._nvml, error):
            self._cannot.add(name)
        else:
            self._errors.append(f"{self._name}: {name}: {error}")


def _pick(values: Mapping[str, int], **names: str) -> dict[str, int]:
    return {new: values[name] for new, name in names.items() if name in values}
