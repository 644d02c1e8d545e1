"""Every collector can fail by itself: it says so, and the others do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from bad_node import Refreshes

from gpulaunch.launcher.cli.collectors import collectors
from gpulaunch.profiler.daemon.findings import Findings
from gpulaunch.profiler.record import Collector
from gpulaunch.profiler.samplers.collectives import CollectivesSampler
from gpulaunch.profiler.samplers.host import HostSampler
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.nvml.gpus import GpuSampler
from gpulaunch.profiler.samplers.nvml.health import GpuHealthSampler
from gpulaunch.profiler.samplers.process import ProcessSampler
from gpulaunch.profiler.samplers.ranks import RankSampler
from gpulaunch.profiler.samplers.run import RunSampler
from gpulaunch.profiler.samplers.stacks import Stacks
from gpulaunch.profiler.samplers.workers import WorkersSampler

# What a collector is made of, and the call that is made each second.
CALLS: dict[Collector, tuple[type[object], str]] = {
    Collector.RANKS: (RankSampler, "read"),
    Collector.PROCESS: (ProcessSampler, "read"),
    Collector.HOST: (HostSampler, "read"),
    Collector.RUN: (RunSampler, "read"),
    Collector.GPU: (GpuHealthSampler, "read"),
    Collector.DEVICE: (GpuSampler, "read"),
    Collector.WORKERS: (WorkersSampler, "read"),
    Collector.COLLECTIVES: (CollectivesSampler, "read"),
    Collector.STACKS: (Stacks, "read"),
    Collector.FINDINGS: (Findings, "look"),
    Collector.LEDGER: (MonotonicTotals, "save"),
}


class UnheardOfError(Exception):
    """What nobody has thought of."""


@pytest.fixture
def refreshes(tmp_path: Path) -> Iterator[Refreshes]:
    made = Refreshes(tmp_path)
    yield made
    made.close()


def failing(refreshes: Refreshes) -> dict[Collector, str]:
    """The collectors out of service after a refresh, and why."""
    found = refreshes.refresh().collectors
    return {each: how.reason for each, how in found.items() if not how.available}


def test_no_collector_is_forgotten_here() -> None:
    assert set(CALLS) == set(Collector) - {Collector.STORE}, "that one is not the loop's: tests/store"


@pytest.mark.parametrize("collector", CALLS)
def test_a_collector_that_fails_says_so_and_the_others_go_on(
    refreshes: Refreshes, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = failing(refreshes)

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise UnheardOfError

    with monkeypatch.context() as patch:
        patch.setattr(*CALLS[collector], fail)
        during = failing(refreshes)
        errors = refreshes.scrape().value("gpulaunch_collector_errors_total", collector=collector.value)
    after = failing(refreshes)

    assert during == {**before, collector: "UnheardOfError"}
    assert errors == 1
    assert after == before
    if collector is not Collector.RANKS:
        assert refreshes.scrape().value("gpulaunch_steps_total") == 150


def test_the_doctor_names_every_collector() -> None:
    assert {finding.name for finding in collectors()} == {f"collector {collector.value}" for collector in Collector}
