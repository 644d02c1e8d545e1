"""Waiting for GPU memory: the decision on readings, and the child that asks a stand-in for NVML.

The stand-in is written from NVML's documentation (nvmlDeviceGetMemoryInfo, nvmlDeviceGetComputeRunningProcesses) and
the signatures of nvidia-ml-py; its cards are a file, which the test changes while the child reads. No GPU was asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.gpus import memory
from gpulaunch.launcher.gpus.memory import (
    TOLERANCE_BYTES,
    Holder,
    MemoryWait,
    Reading,
    busy,
    still_used,
    still_used_message,
)
from gpulaunch.launcher.job.host_info import Gpu
from gpulaunch.launcher.loop.loop import Loop

GIB = 1 << 30
PATIENCE_S = 30.0


def card(index: int) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", name="NVIDIA H200", memory_bytes=139 * GIB, pci_bus_id="0000:3b:00.0")


def reading(used_bytes: int, *holders: Holder) -> Reading:
    return Reading(index=0, uuid="GPU-0", used_bytes=used_bytes, holders=holders)


# -- the decision


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_card_is_given_back_at_its_baseline_and_a_little_more(used_bytes: int, before: int) -> None:
    held = still_used([reading(used_bytes)], {"GPU-0": before})

    assert bool(held) == (used_bytes - before > TOLERANCE_BYTES)


def test_a_card_without_a_baseline_was_empty() -> None:
    assert still_used([reading(TOLERANCE_BYTES)], {}) == []
    assert len(still_used([reading(TOLERANCE_BYTES + 1)], {})) == 1


def test_cards_with_more_than_small_change_are_busy() -> None:
    assert busy({"GPU-0": 0, "GPU-1": TOLERANCE_BYTES, "GPU-2": 2 * GIB}) == {"GPU-2"}


@pytest.mark.parametrize(
    ("holders", "words"),
    [
        (
            [Holder(pid=7, used_bytes=GIB, command="a"), Holder(pid=8, used_bytes=40 * GIB, command="python serve.py")],
            "held by process 8 (python serve.py) with 40.0 GiB; end it if it is yours",
        ),
        (
            [Holder(pid=9, used_bytes=40 * GIB, command="python")],  # a rank: by now another process or a zombie
            "the driver still lists process 9 with 40.0 GiB, which has ended",
        ),
        ([Holder(pid=7, used_bytes=None, command="")], "the driver still lists process 7, which has ended"),
        ([], "no process visible from here uses it; run nvidia-smi on the host"),
    ],
)
def test_the_sentence_names_who_holds_the_most(holders: list[Holder], words: str) -> None:
    said = still_used_message([reading(41 * GIB, *holders)], {"GPU-0": GIB}, frozenset({9}), 10.2)

    assert said == f"GPU 0 still has 40.0 GiB of memory in use 10 s after the ranks ended: {words}"


# -- the child


class NVMLError(Exception):
    """As pynvml's."""


class Driver:
    """What the stand-in reads: for each UUID its used bytes and processes; a card that is not there is lost."""

    def __init__(self, path: Path) -> None:
        self.control_device = str(path / "nvidiactl")
        self._file = path / "cards.json"
        Path(self.control_device).touch()

    def set(self, **cards: tuple[int, list[int]]) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps({uuid.replace("_", "-"): state for uuid, state in cards.items()}))
        fresh.rename(self._file)

    def module(self, *, init: Callable[[], None] = lambda: None) -> ModuleType:
        def handle(uuid: str) -> str:
            if uuid not in json.loads(self._file.read_text()):
                raise NVMLError("GPU is lost")
            return uuid

        def processes(uuid: str) -> list[SimpleNamespace]:
            used_bytes, pids = json.loads(self._file.read_text())[uuid]
            return [SimpleNamespace(pid=pid, usedGpuMemory=used_bytes // len(pids)) for pid in pids]

        nvml = ModuleType("pynvml")
        vars(nvml).update(
            NVMLError=NVMLError,
            nvmlInit=init,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetHandleByUUID=handle,
            nvmlDeviceGetMemoryInfo=lambda uuid: SimpleNamespace(used=json.loads(self._file.read_text())[uuid][0]),
            nvmlDeviceGetComputeRunningProcesses=processes,
        )
        return nvml


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", driver.module())
    # As on a host, wherever this test runs.
    monkeypatch.setattr(memory, "INITIAL_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)
    return driver


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


class Asked:
    """One wait, its answer, and whether the loop turned meanwhile."""

    def __init__(self, loop: Loop, driver: Driver) -> None:
        self.loop = loop
        self.wait = MemoryWait(loop, control_device=driver.control_device)
        self.said: list[str] = []
        self.ticks = 0
        self._tick()

    def _tick(self) -> None:
        self.ticks += 1
        self.loop.call_at(self.loop.now() + 0.01, self._tick)

    def start(self, bound_s: float, *, baseline: dict[str, int] | None = None, cards: int = 1) -> None:
        self.wait.start([card(index) for index in range(cards)], [], baseline or {}, bound_s, self.said.append)

    def until(self, done: Callable[[], object]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < until_s, "nothing happened"
            self.loop.turn(0.1)

    def answer(self) -> str:
        self.until(lambda: self.said)
        self.until(lambda: self.wait.pid is None)
        (said,) = self.said
        return said


@pytest.fixture
def asked(loop: Loop, driver: Driver) -> Iterator[Asked]:
    asked = Asked(loop, driver)
    yield asked
    asked.wait.cancel()
    asked.until(lambda: asked.wait.pid is None)


def test_cards_that_are_free_are_free_at_once(asked: Asked, driver: Driver) -> None:
    driver.set(GPU_0=(0, []), GPU_1=(TOLERANCE_BYTES, [1]))
    asked.start(PATIENCE_S, cards=2)

    assert asked.answer() == ""


def test_it_waits_until_the_memory_is_given_back(asked: Asked, driver: Driver) -> None:
    driver.set(GPU_0=(40 * GIB, [os.getpid()]))
    asked.start(PATIENCE_S)
    held_until = asked.ticks + 20
    asked.until(lambda: asked.ticks > held_until)
    too_early = list(asked.said)
    driver.set(GPU_0=(0, []))

    assert asked.answer() == ""
    assert too_early == []


def test_at_the_bound_the_process_that_still_holds_it_is_named(asked: Asked, driver: Driver) -> None:
    with subprocess.Popen(["sleep", "600"]) as holder:
        driver.set(GPU_0=(40 * GIB, [holder.pid]))
        asked.start(0.2)
        said = asked.answer()
        holder.kill()

    assert f"held by process {holder.pid} (sleep 600) with 40.0 GiB" in said


def test_what_others_had_in_use_before_is_not_waited_for(asked: Asked, driver: Driver) -> None:
    driver.set(GPU_0=(40 * GIB, [1]))
    measured: list[dict[str, int]] = []
    asked.wait.measure([card(0)], PATIENCE_S, measured.append)
    asked.until(lambda: measured and asked.wait.pid is None)
    asked.start(PATIENCE_S, baseline=measured[0])

    assert measured == [{"GPU-0": 40 * GIB}]
    assert asked.answer() == ""


def test_in_a_container_no_process_is_named(asked: Asked, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML tells the host's numbers there, and this number is a stranger's."""
    monkeypatch.setattr(memory, "INITIAL_PID_NAMESPACE", 0)
    driver.set(GPU_0=(40 * GIB, [os.getpid()]))
    asked.start(0.2)

    said = asked.answer()
    assert "GPU 0 still has 40.0 GiB" in said
    assert "process visible from here" in said
    assert str(os.getpid()) not in said


def test_a_lost_card_is_not_waited_for(asked: Asked, driver: Driver) -> None:
    driver.set(GPU_1=(0, []))
    asked.start(PATIENCE_S, cards=2)

    assert asked.answer() == ""


def test_a_driver_that_does_not_answer_holds_up_nobody_but_the_child(
    asked: Asked, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "ANSWER_GRACE_S", 0.1)
    monkeypatch.setitem(sys.modules, "pynvml", driver.module(init=lambda: time.sleep(600)))
    asked.start(3.0)
    ticks = asked.ticks
    assert asked.wait.pid is not None
    asked.until(lambda: asked.ticks > ticks + 5)

    # Nothing of the agent's is open in it (3 is its pipe), so that nobody waits for a pipe that it holds.
    asked.until(lambda: sorted(map(int, os.listdir(f"/proc/{asked.wait.pid}/fd"))) == [0, 1, 2, 3])
    assert "did not respond within 3 s" in asked.answer()


def test_an_nvml_that_fails_is_said_and_not_waited_for(
    asked: Asked, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mismatch() -> None:
        raise NVMLError("Driver/library version mismatch")

    monkeypatch.setitem(sys.modules, "pynvml", driver.module(init=mismatch))
    asked.start(PATIENCE_S)

    assert asked.answer() == ("it is unknown whether GPU memory was freed: NVML: Driver/library version mismatch")


def test_a_cancelled_wait_is_silent_and_its_child_ends(asked: Asked, driver: Driver) -> None:
    driver.set(GPU_0=(40 * GIB, [1]))
    asked.start(PATIENCE_S)
    asked.wait.cancel()
    asked.until(lambda: asked.wait.pid is None)

    assert asked.said == []


def test_without_a_driver_nothing_is_started(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise AssertionError("a child was started")

    monkeypatch.setattr(os, "fork", no_fork)
    said: list[str] = []
    wait = MemoryWait(loop, control_device=str(tmp_path / "nvidiactl"))
    wait.start([card(0)], [], {}, PATIENCE_S, said.append)
    loop.turn(PATIENCE_S)

    assert (said, wait.pid) == ([""], None)
