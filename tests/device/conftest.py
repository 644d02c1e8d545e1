"""What the tests of devices share: the stand-in beside them, a clock, and samplers whose thread ends with the test; and
the node that tests/prometheus exports."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from libnvidia import Library, binding

from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.nvml.gpus import GpuSampler
from gpulaunch.profiler.samplers.nvml.timeout_guard import Helper

_spec = importlib.util.spec_from_file_location(
    "node_of_prometheus", Path(__file__).parents[1] / "prometheus/conftest.py"
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

node = _module.node

PATIENCE_S = 30.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def helper(clock: Clock) -> Iterator[Helper]:
    helper = Helper(clock=clock)
    yield helper
    helper.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node with a driver."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    return tmp_path


@pytest.fixture
def gpus(helper: Helper, root: Path) -> Iterator[Callable[..., GpuSampler]]:
    """Makes the sampler of a node with this library. Every gate of the library is opened at the end."""
    libraries: list[Library] = []

    def make(library: Library, ledger: MonotonicTotals | None = None, *, patience_s: float = PATIENCE_S) -> GpuSampler:
        libraries.append(library)
        return GpuSampler(
            ledger or MonotonicTotals(), helper, nvml=lambda: binding(library), root=root, patience_s=patience_s
        )

    yield make
    for library in libraries:
        for gate in library.gates.values():
            gate.set()
    until_s = time.monotonic() + PATIENCE_S
    while helper.busy_s() is not None and time.monotonic() < until_s:
        time.sleep(0.001)  # the next test's library takes the place of this one's
