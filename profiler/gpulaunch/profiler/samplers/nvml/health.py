"""Samples GPU faults of this node with NVML: Xid events, uncorrected ECC errors, recommended recovery actions.

Xids are events: those before the registration are never delivered, so the ones seen are kept in `gpu-health.json`. The
agent reads that file before it restarts ranks, and the next sidecar takes them over from it. Every call is guarded
separately: cards, drivers and bindings differ in what they support, and a GPU that has fallen off the bus does not
answer at all.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpulaunch.profiler.files import read_file, write_file
from gpulaunch.profiler.record import GpuHealth, Reading
from gpulaunch.profiler.samplers.nvml import driver
from gpulaunch.profiler.xid import XIDS

HEALTH_FILE: Final = "gpu-health.json"
_VERSION: Final = 1
_EVENTS_A_READING: Final = 64  # a faulty GPU may report without end; the rest is left to the next reading
_STRANGE_XIDS: Final = 8
"""How many numbers outside `XIDS` are kept per GPU: an event has 64 bits for it, and a faulty driver sends any."""
_BEYOND: Final = 0  # the number under which the rest is counted; no Xid has it
_ACTION: Final = "NVML_GPU_RECOVERY_ACTION_"


@dataclass(kw_only=True)
class _Gpu:
    """One GPU in NVML, and its reports so far."""

    handle: Any
    index: int
    uuid: str
    xids: Counter[int] = field(default_factory=Counter[int])
    ecc_uncorrected: int | None = None
    ecc_before: int | None = None
    """The count when this run began: the driver counts since it was loaded."""
    recovery_action: str = "unknown"
    cannot: set[str] = field(default_factory=set[str])
    """Calls that it does not support, which are not repeated."""

    def count(self, xid: int, times: int = 1) -> None:
        """Count an Xid, by its number if that is known or one of the first few others."""
        strange = self.xids.keys() - XIDS - {_BEYOND}
        told_apart = xid in XIDS or xid in strange or len(strange) < _STRANGE_XIDS
        self.xids[xid if told_apart else _BEYOND] += times

    def health(self) -> GpuHealth:
        return GpuHealth(
            index=self.index,
            uuid=self.uuid,
            xids=dict(self.xids),
            ecc_uncorrected=self.ecc_uncorrected,
            recovery_action=self.recovery_action,
        )


class GpuHealthSampler:
    """Reads the health of every GPU of the node from NVML and writes it to `gpu-health.json`."""

    def __init__(
        self,
        channel_dir: Path,
        *,
        nvml: Callable[[], Any] = driver.find_nvml,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = channel_dir / HEALTH_FILE
        self._load = nvml
        self._root = root
        self._clock = clock
        self._wall = wall
        self._nvml: Any = None
        self._events: Any = None
        self._gpus: list[_Gpu] = []
        self._actions: dict[int, str] = {}
        self._absent: str | None = None
        self._errors: list[str] = []

    def read(self, now: float) -> Reading[tuple[GpuHealth, ...]]:
        """Return the health of every GPU; without NVML, nothing and the reason. Never waits for an event."""
        if self._absent is None:
            self._absent = self._open()
        if self._absent:
            return Reading(values=(), absent=self._absent)
        self._take_events()
        for gpu in self._gpus:
            self._ask(gpu)
        values = tuple(gpu.health() for gpu in self._gpus)
        try:
            self._write()
        except OSError as error:
            self._errors.append(f"{HEALTH_FILE}: {error.strerror}")
        errors, self._errors = tuple(self._errors), []
        return Reading(values=values, errors=errors, late_s=self._clock() - now)

    def _open(self) -> str:
        """Find the GPUs and register for their Xids; return the reason if there is no NVML here."""
        if why := driver.missing(self._root):
            return why
        self._nvml, num_gpus, why = driver.open_nvml(self._load)
        if why:
            return why
        names = [name for name in dir(self._nvml) if name.startswith(_ACTION)]
        self._actions = {getattr(self._nvml, name): name.removeprefix(_ACTION).lower() for name in names}
        for index in range(num_gpus):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = driver.text(self._nvml.nvmlDeviceGetUUID(handle))
                self._gpus.append(_Gpu(handle=handle, index=index, uuid=uuid))
            except Exception as error:
                self._errors.append(f"GPU {index}: {error}")
        self._take_over()
        try:
            self._events = self._nvml.nvmlEventSetCreate()
        except Exception as error:
            self._errors.append(f"no Xid events: {error}")
            return ""
        for gpu in self._gpus:
            try:
                self._nvml.nvmlDeviceRegisterEvents(gpu.handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)
            except Exception as error:
                self._errors.append(f"GPU {gpu.index}: no Xid events: {error}")
        return ""

    def _take_events(self) -> None:
        """Count the Xids reported since the last reading."""
        if self._events is None:
            return
        for _ in range(_EVENTS_A_READING):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except Exception as error:
                if not driver.is_code(self._nvml, error, "TIMEOUT"):  # TIMEOUT means that there is none
                    self._errors.append(f"Xid events: {error}")
                return
            # By its handle: for a GPU that has fallen off the bus even the index can no longer be read.
            address = _address(event.device)
            for gpu in self._gpus:
                if _address(gpu.handle) == address:
                    gpu.count(int(event.eventData))

    def _ask(self, gpu: _Gpu) -> None:
        for what, ask in (("ECC errors", self._ask_ecc), ("recovery action", self._ask_recovery)):
            if what in gpu.cannot:
                continue
            try:
                ask(gpu)
            except Exception as error:
                if driver.is_final(self._nvml, error):
                    gpu.cannot.add(what)  # reported once: it is permanent
                self._errors.append(f"GPU {gpu.index}: {what}: {error}")

    def _ask_ecc(self, gpu: _Gpu) -> None:
        nvml = self._nvml
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            gpu.handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        gpu.ecc_uncorrected = max(int(errors), gpu.ecc_uncorrected or 0)
        if gpu.ecc_before is None:
            gpu.ecc_before = gpu.ecc_uncorrected

    def _ask_recovery(self, gpu: _Gpu) -> None:
        nvml = self._nvml
        (field_value,) = nvml.nvmlDeviceGetFieldValues(gpu.handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if field_value.nvmlReturn:
            raise nvml.NVMLError(field_value.nvmlReturn)
        gpu.recovery_action = self._actions.get(field_value.value.uiVal, "unknown")

    def _write(self) -> None:
        gpus = [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "xids": sorted(gpu.xids.keys() - {_BEYOND}),
                "xid_counts": {str(xid): count for xid, count in sorted(gpu.xids.items())},
                "ecc_uncorrected": gpu.ecc_uncorrected,
                "ecc_before": gpu.ecc_before,
                "recovery_action": gpu.recovery_action,
            }
            for gpu in self._gpus
        ]
        write_file(self._path, [json.dumps({"version": _VERSION, "time_s": round(self._wall(), 3), "gpus": gpus})])

    def _take_over(self) -> None:
        """Continue from the counts of an earlier sidecar; a damaged file is treated as missing."""
        try:
            document: Any = json.loads(read_file(self._path))
            known = {gpu["uuid"]: gpu for gpu in document["gpus"]} if document["version"] == _VERSION else {}
            for gpu in self._gpus:
                before = known.get(gpu.uuid, {})
                counts = {int(xid): int(count) for xid, count in before.get("xid_counts", {}).items()}
                for xid, count in counts.items():
                    gpu.count(xid, count)
                if before.get("ecc_before") is not None:
                    gpu.ecc_before = int(before["ecc_before"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return


def _address(handle: Any) -> int | None:
    """The address in a device handle of NVML; two handles of one GPU are two objects with the same address."""
    return ctypes.cast(handle, ctypes.c_void_p).value
