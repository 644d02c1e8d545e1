"""A stand-in for libnvidia-ml, below the real binding: C functions that get the binding's C arguments.

Written from NVML's documentation (nvml.h and its API reference) and held against no card. What it answers are plain
attributes of its cards, for the tests to set: a number, or a `Code` for what is refused.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

ALL_LINKS = 0xFFFFFFFF
GIB = 1 << 30


class Code(Exception):
    """What a function of NVML's returns instead of success."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


NOT_SUPPORTED = Code(pynvml.NVML_ERROR_NOT_SUPPORTED)
NOT_FOUND = Code(pynvml.NVML_ERROR_NOT_FOUND)
LOST = Code(pynvml.NVML_ERROR_GPU_IS_LOST)


@dataclass(frozen=True)
class Narrow:
    """A field's value that comes as an unsigned int; others come as unsigned long long."""

    value: int


@dataclass
class Gpu:
    """One card, or one MIG instance; as it stands here it is an H200 at work, with everything that NVML can say."""

    uuid: str
    name: str = "NVIDIA H200"
    slot: str | Code = "00000000:3B:00.0"
    answers: dict[str, Any] = field(
        default_factory=lambda: {
            "nvmlDeviceGetUtilizationRates": 97,
            "nvmlDeviceGetMemoryInfo": (40 * GIB, 139 * GIB),
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetTemperatureV": 61,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetPowerUsage": 640_000,
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
            "nvmlDeviceGetMigMode": pynvml.NVML_DEVICE_MIG_DISABLE,
            "nvmlDeviceGetMaxMigDeviceCount": 7,
            "nvmlDeviceGetGpuInstanceId": 0,
            "nvmlDeviceGetComputeInstanceId": 0,
            "nvmlDeviceGetFieldValues": None,
        }
    )
    fields: dict[int, Any] = field(
        default_factory=lambda: (
            dict.fromkeys((3, 4, 74, 75, 76, 77, 79, 94, 138, 139, 142, 143, 144, 145), 0)
            | {83: 7_000_000_000, 186: Narrow(650_500), 197: 5 * GIB, 198: 9 * GIB}
        )
    )
    """By number; those of NVLink are for all links together."""
    gpm: dict[int, Any] | None = field(
        default_factory=lambda: (
            {1: 99.0, 2: 88.0, 3: 42.5, 5: 61.0, 10: 33.0, 11: 0.0, 12: 7.0, 13: 1.0}
            | {20: 100.0, 21: 200.0, 60: 0.0, 61: 0.0}
        )
    )
    """Metrics by number; None: a card older than Hopper."""
    instances: dict[int, Gpu] = field(default_factory=dict)
    """MIG instances by place; places have gaps."""
    lost: bool = False


class Library:
    """The shared library: its functions by their C names, so far as the samplers may call them."""

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = list(gpus)
        self.initialised: Code | None = None
        self.asked: list[str] = []
        self.lacks: set[str] = set()
        """Functions that this driver's library does not have."""
        self.gates: dict[str, threading.Event] = {}
        """Functions that do not come back until their gate is opened."""
        self.entered = threading.Event()
        """Set when a call stands before a gate."""
        self.samples: dict[int, tuple[Gpu, int | None, int] | None] = {}
        """GPM buffers: the card, the GPU instance and when, by a count; None: empty."""
        self._count = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """As ctypes' CDLL: a new function object, or AttributeError if there is none of the name."""
        function = None if name in self.__dict__["lacks"] else type(self).__dict__.get(f"c_{name}")
        answer = self._simple(name) if function is None and name in _SIMPLE and name not in self.lacks else None
        if function is None and answer is None:
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            self.asked.append(name)
            if (gate := self.gates.get(name)) is not None:
                self.entered.set()
                gate.wait()
            try:
                return (function(self, *args) if function else answer(*args)) or 0  # type: ignore[misc]
            except Code as refused:
                return refused.code

        return call

    def _simple(self, name: str) -> Callable[..., None]:
        def answer(handle: Any, *args: Any) -> None:
            _SIMPLE[name](self._answer(handle, name), *args)

        return answer

    def gpu_of(self, handle: Any) -> Gpu:
        address = ctypes.cast(handle, ctypes.c_void_p).value or 0
        place, number = divmod(address, 4096)
        gpu = self.gpus[number - 1]
        if gpu.lost:
            raise LOST
        if place:
            if place - 1 not in gpu.instances:
                raise Code(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            return gpu.instances[place - 1]
        return gpu

    def _answer(self, handle: Any, name: str) -> Any:
        answer = self.gpu_of(handle).answers.get(name, NOT_SUPPORTED)
        if isinstance(answer, Code):
            raise answer
        return answer

    def c_nvmlInitWithFlags(self, _flags: int) -> None:
        if self.initialised is not None:
            raise self.initialised

    def c_nvmlErrorString(self, code: int) -> bytes:
        return f"code {code}".encode()

    def c_nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = len(self.gpus)

    def c_nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> None:
        _point(handle._obj, index.value + 1)

    def c_nvmlDeviceGetUUID(self, handle: Any, text: Any, _size: Any) -> None:
        text.value = self.gpu_of(handle).uuid.encode()

    def c_nvmlDeviceGetName(self, handle: Any, text: Any, _size: Any) -> None:
        text.value = self.gpu_of(handle).name.encode()

    def c_nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> None:
        slot = self.gpu_of(handle).slot
        if isinstance(slot, Code):
            raise slot
        info._obj.busId = slot.encode()

    def c_nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, place: Any, instance: Any) -> None:
        if place.value not in self.gpu_of(handle).instances:
            raise NOT_FOUND
        address = ctypes.cast(handle, ctypes.c_void_p).value or 0
        _point(instance._obj, address + 4096 * (place.value + 1))

    def c_nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> None:
        self._answer(handle, "nvmlDeviceGetFieldValues")
        fields = self.gpu_of(handle).fields
        assert count.value == len(values._obj)
        for each in values._obj:
            assert each.scopeId == (ALL_LINKS if each.fieldId in (138, 139) else 0)
            answer = fields.get(each.fieldId, NOT_SUPPORTED)
            if isinstance(answer, Code):
                each.nvmlReturn = answer.code
            elif isinstance(answer, Narrow):
                each.valueType, each.value.uiVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, answer.value
            else:
                each.valueType, each.value.ullVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, answer

    def c_nvmlGpmQueryDeviceSupport(self, handle: Any, support: Any) -> None:
        support._obj.isSupportedDevice = self.gpu_of(handle).gpm is not None

    def c_nvmlGpmSampleAlloc(self, buffer: Any) -> None:
        self._count += 1
        self.samples[self._count * 16] = None
        _point(buffer._obj, self._count * 16)

    def c_nvmlGpmSampleFree(self, buffer: Any) -> None:
        del self.samples[_address(buffer)]

    def c_nvmlGpmSampleGet(self, handle: Any, buffer: Any) -> None:
        self._sample(self.gpu_of(handle), None, buffer)

    def c_nvmlGpmMigSampleGet(self, handle: Any, instance: int, buffer: Any) -> None:
        self._sample(self.gpu_of(handle), instance, buffer)

    def _sample(self, gpu: Gpu, instance: int | None, buffer: Any) -> None:
        if gpu.gpm is None:
            raise NOT_SUPPORTED
        self._count += 1
        assert _address(buffer) in self.samples
        self.samples[_address(buffer)] = gpu, instance, self._count

    def c_nvmlGpmMetricsGet(self, request: Any) -> None:
        asked = request._obj
        older, newer = self.samples[_address(asked.sample1)], self.samples[_address(asked.sample2)]
        assert older is not None
        assert newer is not None
        assert older[:2] == newer[:2], "samples of two GPUs"
        assert older[2] < newer[2], "the wrong way round"
        assert asked.version == 1
        gpu, instance, _ = newer
        if instance is not None:
            (gpu,) = (each for each in gpu.instances.values() if each.answers["nvmlDeviceGetGpuInstanceId"] == instance)
        assert gpu.gpm is not None
        for metric in asked.metrics[: asked.numMetrics]:
            answer = gpu.gpm.get(metric.metricId, NOT_SUPPORTED)
            if isinstance(answer, Code):
                metric.nvmlReturn = answer.code
            else:
                metric.nvmlReturn, metric.value = 0, answer


def _point(pointer: Any, address: int) -> None:
    ctypes.c_void_p.from_buffer(pointer).value = address


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _into_last(answer: int, *args: Any) -> None:
    args[-1]._obj.value = answer


def _memory(answer: tuple[int, int], info: Any) -> None:
    info._obj.used, info._obj.total = answer


def _utilization(answer: int, rates: Any) -> None:
    rates._obj.gpu = answer


def _temperature(answer: int, reading: Any) -> None:
    assert reading._obj.sensorType == pynvml.NVML_TEMPERATURE_GPU
    reading._obj.temperature = answer


def _clock(answer: int, domain: Any, clock: Any) -> None:
    assert domain.value == pynvml.NVML_CLOCK_SM
    clock._obj.value = answer


def _mode(answer: int, current: Any, _pending: Any) -> None:
    current._obj.value = answer


_SIMPLE: dict[str, Callable[..., None]] = {
    "nvmlDeviceGetUtilizationRates": _utilization,
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetClockInfo": _clock,
    "nvmlDeviceGetTemperatureV": _temperature,
    "nvmlDeviceGetMigMode": _mode,
    **dict.fromkeys(
        (
            *("nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage"),
            *("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth"),
            *("nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth"),
            *("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
            *("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId"),
        ),
        _into_last,
    ),
}


def binding(library: Library) -> Any:
    """The real binding, a copy of its own, over this library."""
    name = "pynvml_over_the_stand_in"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, pynvml.__file__)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    module: Any = sys.modules[name]
    module.nvmlLib = library
    module._nvmlGetFunctionPointer_cache.clear()
    return module
