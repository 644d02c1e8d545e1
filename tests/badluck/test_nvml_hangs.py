"""A driver that does not answer, under a whole sidecar: it is waited for once, and a moment only."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulaunch.profiler.daemon.sidecar import Sidecar
from gpulaunch.profiler.record import Collector, NodeState

BOUND_S = 60.0
GPU = (Collector.GPU, Collector.DEVICE)


class Driver(types.ModuleType):
    """A binding of NVML whose first call stands before a gate."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.gate = threading.Event()
        self.asked = 0

    def nvmlInit(self) -> None:
        self.asked += 1
        assert self.gate.wait(BOUND_S)

    def nvmlDeviceGetCount(self) -> int:
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    yield driver
    driver.gate.set()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node with a driver, shared memory and figures of its memory."""
    for directory in ("dev/shm", "proc"):
        (tmp_path / "root" / directory).mkdir(parents=True)
    (tmp_path / "root/dev/nvidiactl").touch()
    (tmp_path / "root/proc/meminfo").write_bytes(Path("/proc/meminfo").read_bytes())
    return tmp_path / "root"


def reasons(state: NodeState) -> list[str]:
    return [state.collectors[collector].reason for collector in GPU]


def test_a_driver_that_hangs_costs_its_figures_and_the_loop_goes_on(driver: Driver, root: Path, tmp_path: Path) -> None:
    states: list[NodeState] = []
    sidecar = Sidecar(tmp_path, states.append, root=root, interval_s=0.001)
    rounds = iter(range(40))

    sidecar.run(lambda _: next(rounds, None) is None)

    assert not driver.gate.is_set(), "the loop has come to its end, and nobody has opened the gate"
    assert driver.asked == 1
    assert len(states) == 40
    assert all("NVML has not answered for " in reason for reason in reasons(states[-1]))
    others = [collector for collector in Collector if collector not in (*GPU, Collector.STORE)]
    assert all(states[-1].collectors[collector].available for collector in others)
    waited_s = [states[-1].collectors[collector].spent_s for collector in GPU]
    # Both together have waited once: as long as one of 40 refreshes may, and not 40 times as long.
    first_s = sum(states[0].collectors[collector].spent_s for collector in GPU)
    assert sum(waited_s) < 4 * first_s


def test_a_driver_that_answers_is_not_said_to_hang(driver: Driver, root: Path, tmp_path: Path) -> None:
    driver.gate.set()
    sidecar = Sidecar(tmp_path, lambda _: None, root=root)
    state = sidecar.refresh()
    sidecar.close()

    assert reasons(state)[1] == "NVML shows no GPU"
    assert "not answered" not in reasons(state)[0]
