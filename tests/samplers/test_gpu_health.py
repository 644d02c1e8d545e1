"""What NVML holds against GPUs, as the sidecar reads it.

The GPUs here are a stand-in, written from NVML's documentation (the header nvml.h and its API reference) and never
held against a card: events, fields and error codes are NVML's own, through the structures of the real binding, and how
a driver behaves in trouble is as the documentation has it. The last tests ask the real binding: where there is a GPU
for what is there, elsewhere for its refusal.
"""

from __future__ import annotations

import ctypes
import json
import types
from collections import deque
from pathlib import Path
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.gpus import health as agent_side
from gpulaunch.profiler.record import GpuHealth
from gpulaunch.profiler.samplers.nvml.health import HEALTH_FILE, GpuHealthSampler

NOT_SUPPORTED, TIMEOUT, LOST = pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_GPU_IS_LOST


class Card:
    """One GPU of the stand-in."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.ecc: int | None = 0
        self.action: int | None = pynvml.NVML_GPU_RECOVERY_ACTION_NONE
        self.has_events = True
        self.lost = False
        self.registered = 0


class Driver:
    """A node with NVML: what the binding is asked, answered from the cards."""

    def __init__(self, num_cards: int = 2) -> None:
        self.cards = [Card(index) for index in range(num_cards)]
        self.events: deque[tuple[int, int]] = deque()
        self.asked: list[str] = []

    def binding(self, *, without: tuple[str, ...] = ()) -> Any:
        """The real binding with its calls into the driver replaced; `without`: what an older one does not have."""
        module = types.ModuleType("pynvml")
        names = vars(pynvml).items()
        vars(module).update({name: value for name, value in names if not name.startswith(("nvmlDevice", "nvmlE"))})
        module.__dict__["nvmlEventTypeXidCriticalError"] = pynvml.nvmlEventTypeXidCriticalError
        for call in (
            *("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"),
            *("nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"),
            *("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetFieldValues"),
        ):
            vars(module)[call] = getattr(self, call)
        for name in without:
            del vars(module)[name]
        return module

    def happens(self, xid: int, *, gpu: int) -> None:
        """The driver reports an Xid, if anybody has registered for it; what was before is never told."""
        if self.cards[gpu].registered & pynvml.nvmlEventTypeXidCriticalError:
            self.events.append((gpu, xid))

    def _card(self, handle: Any) -> Card:
        card = self.cards[(ctypes.cast(handle, ctypes.c_void_p).value or 0) // 4096 - 1]
        if card.lost:
            raise pynvml.NVMLError(LOST)
        return card

    def nvmlInit(self) -> None:
        self.asked.append("nvmlInit")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return ctypes.cast(4096 * (index + 1), pynvml.c_nvmlDevice_t)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return f"GPU-{self._card(handle).index:032x}"

    def nvmlEventSetCreate(self) -> str:
        return "the event set"

    def nvmlDeviceRegisterEvents(self, handle: Any, types: int, event_set: str) -> None:
        card = self._card(handle)
        if not card.has_events:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        card.registered |= types

    def nvmlEventSetWait_v2(self, event_set: str, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "a reading must not wait"
        if not self.events:
            raise pynvml.NVMLError(TIMEOUT)
        gpu, xid = self.events.popleft()
        return pynvml.c_nvmlEventData_t(
            device=self.nvmlDeviceGetHandleByIndex(gpu),
            eventType=pynvml.nvmlEventTypeXidCriticalError,
            eventData=xid,
        )

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, error_type: int, counter_type: int) -> int:
        assert (error_type, counter_type) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        self.asked.append("ecc")
        ecc = self._card(handle).ecc
        if ecc is None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return ecc

    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[int]) -> Any:
        assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        action = self._card(handle).action
        values = (pynvml.c_nvmlFieldValue_t * 1)()
        values[0].nvmlReturn = NOT_SUPPORTED if action is None else pynvml.NVML_SUCCESS
        values[0].value.uiVal = action or 0
        return values


@pytest.fixture
def driver() -> Driver:
    return Driver()


def a_sampler(directory: Path, driver: Driver, *, without: tuple[str, ...] = ()) -> GpuHealthSampler:
    (directory / "dev").mkdir(exist_ok=True)
    (directory / "dev/nvidiactl").touch()
    return GpuHealthSampler(
        directory, nvml=lambda: driver.binding(without=without), root=directory, wall=lambda: 1_790_000_000.25
    )


def read(sampler: GpuHealthSampler) -> tuple[GpuHealth, ...]:
    reading = sampler.read(0.0)
    assert (reading.errors, reading.absent) == ((), "")
    return reading.values


def written(directory: Path) -> Any:
    return json.loads((directory / HEALTH_FILE).read_text())


def test_gpus_that_are_well(driver: Driver, tmp_path: Path) -> None:
    values = read(a_sampler(tmp_path, driver))
    assert [(gpu.index, gpu.uuid) for gpu in values] == [(0, f"GPU-{0:032x}"), (1, f"GPU-{1:032x}")]
    assert {(tuple(gpu.xids), gpu.ecc_uncorrected, gpu.recovery_action) for gpu in values} == {((), 0, "none")}
    assert written(tmp_path) == {
        "version": 1,
        "time_s": 1_790_000_000.25,
        "gpus": [
            {
                "index": index,
                "uuid": f"GPU-{index:032x}",
                "xids": [],
                "xid_counts": {},
                "ecc_uncorrected": 0,
                "ecc_before": 0,
                "recovery_action": "none",
            }
            for index in (0, 1)
        ],
    }
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == [HEALTH_FILE]


def test_xids_are_counted_for_the_gpu_that_they_happened_on(driver: Driver, tmp_path: Path) -> None:
    sampler = a_sampler(tmp_path, driver)
    driver.happens(43, gpu=1)  # before anybody has registered
    read(sampler)
    driver.happens(79, gpu=1)
    driver.happens(48, gpu=1)
    driver.happens(79, gpu=1)
    values = read(sampler)
    assert [gpu.xids for gpu in values] == [{}, {79: 2, 48: 1}]
    assert [gpu["xids"] for gpu in written(tmp_path)["gpus"]] == [[], [48, 79]]
    assert read(sampler) == values


def test_a_gpu_that_has_fallen_off_the_bus_leaves_its_last_words(driver: Driver, tmp_path: Path) -> None:
    """Its Xid comes although the card answers nothing any more; what it had said before stays."""
    sampler = a_sampler(tmp_path, driver)
    driver.cards[0].ecc = 3
    read(sampler)
    driver.happens(79, gpu=0)
    driver.cards[0].lost = True
    reading = sampler.read(1.0)
    assert (reading.values[0].xids, reading.values[0].ecc_uncorrected) == ({79: 1}, 3)
    assert reading.values[1].recovery_action == "none"
    assert [error.partition(": GPU is lost")[0] for error in reading.errors] == [
        "GPU 0: ECC errors",
        "GPU 0: recovery action",
    ]


def test_what_the_driver_wants_done_has_its_name(driver: Driver, tmp_path: Path) -> None:
    driver.cards[0].action = pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT
    driver.cards[1].action = 99  # of a driver that is newer than the binding
    assert [gpu.recovery_action for gpu in read(a_sampler(tmp_path, driver))] == ["node_reboot", "unknown"]


def test_what_a_card_cannot_say_is_told_once_and_not_asked_again(driver: Driver, tmp_path: Path) -> None:
    """A card without ECC, without events, with an old driver; the other one is asked as ever."""
    card = driver.cards[0]
    card.ecc = card.action = None
    card.has_events = False
    sampler = a_sampler(tmp_path, driver)
    first, second = sampler.read(0.0), sampler.read(1.0)
    assert [error.rpartition(": ")[0] for error in first.errors] == [
        "GPU 0: no Xid events",
        "GPU 0: ECC errors",
        "GPU 0: recovery action",
    ]
    assert second.errors == ()
    assert [(gpu.ecc_uncorrected, gpu.recovery_action) for gpu in second.values] == [(None, "unknown"), (0, "none")]
    assert written(tmp_path)["gpus"][0]["ecc_uncorrected"] is None
    assert driver.asked.count("ecc") == 3


def test_a_binding_that_lacks_a_call_is_no_trouble(driver: Driver, tmp_path: Path) -> None:
    sampler = a_sampler(tmp_path, driver, without=("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", "nvmlEventSetCreate"))
    first, second = sampler.read(0.0), sampler.read(1.0)
    assert len(first.errors) == 3
    assert second.errors == ()
    assert [(gpu.ecc_uncorrected, gpu.recovery_action) for gpu in second.values] == [(0, "unknown")] * 2


def test_an_error_count_does_not_fall(driver: Driver, tmp_path: Path) -> None:
    sampler = a_sampler(tmp_path, driver)
    driver.cards[0].ecc = 5
    read(sampler)
    driver.cards[0].ecc = 0
    assert read(sampler)[0].ecc_uncorrected == 5


def test_a_storm_of_xids_is_taken_in_portions(driver: Driver, tmp_path: Path) -> None:
    sampler = a_sampler(tmp_path, driver)
    read(sampler)
    for _ in range(100):
        driver.happens(31, gpu=0)
    assert read(sampler)[0].xids == {31: 64}
    assert read(sampler)[0].xids == {31: 100}


def test_a_driver_that_makes_up_numbers_fills_neither_memory_nor_the_file(driver: Driver, tmp_path: Path) -> None:
    """An event has 64 bits for its Xid. The known ones are told apart whatever else comes; of the others, eight."""
    strange = [2**63 + number for number in range(40)]
    first = a_sampler(tmp_path, driver)
    read(first)
    for xid in (*strange, 79, strange[0]):
        driver.happens(xid, gpu=0)
    counted = {strange[0]: 2, **dict.fromkeys(strange[1:8], 1), 0: 32, 79: 1}
    assert read(first)[0].xids == counted
    assert written(tmp_path)["gpus"][0]["xids"] == [79, *strange[:8]]  # the agent is told of no Xid 0

    second = a_sampler(tmp_path, driver)
    assert read(second)[0].xids == counted
    for xid in (strange[39], strange[7], 79, 31):
        driver.happens(xid, gpu=0)
    assert read(second)[0].xids == {**counted, 0: 33, strange[7]: 2, 79: 2, 31: 1}


def test_the_next_sidecar_goes_on_with_what_this_one_saw(driver: Driver, tmp_path: Path) -> None:
    first = a_sampler(tmp_path, driver)
    read(first)
    driver.happens(79, gpu=1)
    driver.happens(79, gpu=1)
    read(first)
    second = a_sampler(tmp_path, driver)
    assert [gpu.xids for gpu in read(second)] == [{}, {79: 2}]
    driver.happens(79, gpu=1)
    assert read(second)[1].xids == {79: 3}


def test_the_agent_understands_the_file(driver: Driver, tmp_path: Path) -> None:
    sampler = a_sampler(tmp_path, driver)
    read(sampler)
    driver.happens(79, gpu=1)
    driver.cards[1].ecc = 2
    driver.cards[1].action = pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET
    read(sampler)
    well, ill = agent_side.read(str(tmp_path))
    assert agent_side.fault(well) == ""
    assert agent_side.fault(ill).endswith(
        "Xid 79 (the GPU has fallen off the bus), 2 uncorrected ECC errors, that it needs gpu reset"
    )


def test_a_file_that_cannot_be_written_is_told(driver: Driver, tmp_path: Path) -> None:
    sampler = a_sampler(tmp_path, driver)
    (tmp_path / f"{HEALTH_FILE}.tmp").mkdir()
    reading = sampler.read(0.0)
    assert len(reading.values) == 2
    assert reading.errors == (f"{HEALTH_FILE}: Is a directory",)


documents = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)
counts = st.dictionaries(st.text() | st.integers().map(str), st.none() | st.integers(0) | st.text())


@given(
    content=st.binary()
    | documents.map(lambda gpus: json.dumps({"version": 1, "gpus": gpus}).encode())
    | counts.map(
        lambda counts: json.dumps({"version": 1, "gpus": [{"uuid": f"GPU-{0:032x}", "xid_counts": counts}]}).encode()
    )
)
def test_a_damaged_file_of_the_sidecar_before_is_as_good_as_none(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("channel")
    (directory / HEALTH_FILE).write_bytes(content)
    assert len(read(a_sampler(directory, Driver()))) == 2
    assert len(written(directory)["gpus"]) == 2


def test_without_a_driver_nvml_is_not_even_loaded(tmp_path: Path) -> None:
    sampler = GpuHealthSampler(tmp_path, nvml=lambda: pytest.fail("loaded"), root=tmp_path)
    reading = sampler.read(0.0)
    assert (reading.values, reading.errors, reading.absent) == ((), (), "no NVIDIA driver on this node")
    assert not (tmp_path / HEALTH_FILE).exists()


def test_a_binding_that_does_not_fit_its_driver_is_told_and_asked_once(driver: Driver, tmp_path: Path) -> None:
    sampler = a_sampler(tmp_path, driver, without=("nvmlDeviceGetCount",))
    assert sampler.read(0.0).absent == sampler.read(1.0).absent != ""
    assert driver.asked == ["nvmlInit"]


def real_gpus() -> int:
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def test_the_real_binding_refuses_where_there_is_no_driver(tmp_path: Path) -> None:
    if real_gpus():
        pytest.skip("there is a GPU here")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    reading = GpuHealthSampler(tmp_path, root=tmp_path).read(0.0)
    assert reading.values == ()
    assert reading.absent.startswith("no NVML: ")


def test_real_gpus_are_read(tmp_path: Path) -> None:
    if not real_gpus():
        pytest.skip("no GPU here")
    sampler = GpuHealthSampler(tmp_path)
    reading = sampler.read(0.0)
    assert len(reading.values) == real_gpus()
    assert all(gpu.uuid.startswith("GPU-") for gpu in reading.values)
    assert sampler.read(1.0).errors == ()


def test_errors_of_before_this_run_are_told_apart(tmp_path: Path) -> None:
    """The driver counts since it was loaded; an old error must not colour every later failure. Nor must a sidecar's
    restart make the run's own errors old ones."""
    driver = Driver()
    driver.cards[0].ecc = 7
    read(a_sampler(tmp_path, driver))
    assert written(tmp_path)["gpus"][0]["ecc_before"] == 7

    driver.cards[0].ecc = 9
    read(a_sampler(tmp_path, driver))

    assert (written(tmp_path)["gpus"][0]["ecc_before"], written(tmp_path)["gpus"][0]["ecc_uncorrected"]) == (7, 9)
